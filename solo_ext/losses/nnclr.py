"""The symmetric loss of NNCLR."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.losses.common import LOSSES, unit_rows
from solo_ext.losses.contrastive import (
    PLAIN,
    ContrastiveTerms,
    NegativeEstimator,
    contrastive,
    own_columns,
)
from solo_ext.losses.mochi import Mixing


def plain_nnclr(nn: Tensor, p: Tensor, temperature: float, symmetric: bool = True) -> Tensor:
    """Eq. 3 and its transpose on the (N, N) matrix of unit rows, on one process; the reference."""
    logits = nn @ p.T / temperature
    own = torch.arange(len(nn), device=nn.device)
    rows = F.cross_entropy(logits, own)
    return (rows + F.cross_entropy(logits.T, own)) / 2 if symmetric else rows


def nnclr_terms(
    nn: Tensor,
    p: Tensor,
    temperature: float,
    symmetric: bool = True,
    estimator: NegativeEstimator = PLAIN,
    mixing: Mixing | None = None,
    joined: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ContrastiveTerms]:
    """The loss, and the terms of its rows.

    Args:
        nn: (N, D) nearest neighbours.
        p: (N, D) predictions of the other view.
        temperature: above 0.
        symmetric: as in :func:`nnclr_symmetric_loss_func`.
        estimator: of the mass of the other samples.
        mixing: synthetic negatives of the row term, made of other samples' predictions.
        joined: unit rows of ``nn`` and of ``p``, (G, D) each, gathered from all processes with
            gradient, for callers that need them more than once; gathered here by default.

    Example:
        >>> loss, rows = nnclr_terms(torch.randn(4, 8), torch.randn(4, 8), temperature=0.1)
        >>> loss.shape, rows.losses.shape
        (torch.Size([]), torch.Size([4, 1]))
    """
    nn, p = unit_rows(nn=nn, p=p)
    gather = distributed.gather_with_gradient
    all_nn, all_p = joined or (None, gather(p))
    settings: Any = {
        "excluded_columns": own_columns(p),
        "estimator": estimator,
        "temperature": temperature,
    }
    rows = contrastive(nn, p.unsqueeze(1), all_p, mixing=mixing, **settings)
    if not symmetric:
        return rows.loss, rows
    all_nn = gather(nn) if all_nn is None else all_nn
    columns = contrastive(p, nn.unsqueeze(1), all_nn, **settings)
    return (rows.loss + columns.loss) / 2, rows


@LOSSES.register(
    "nnclr_symmetric_loss_func",
    paper="With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning of Visual "
    "Representations",
    year=2021,
    arxiv="2104.14548",
)
def nnclr_symmetric_loss_func(
    nn: Tensor, p: Tensor, temperature: float = 0.1, symmetric: bool = True
) -> Tensor:
    """Cross-entropy between nearest neighbours and the other view's predictions, both ways.

    Row term ``-log(exp(nn_i.p_i / T) / sum_k exp(nn_i.p_k / T))`` (Eq. 3 of Dwibedi et al., ICCV
    2021), k over the batch; column term the same with ``exp(nn_k.p_i / T)`` in the sum; half their
    sum, mean over the samples.

    Args:
        nn: (N, D) nearest neighbours of one view; normalised inside.
        p: (N, D) predictions of the other view; normalised inside.
        temperature: T, above 0.
        symmetric: ``False`` keeps only the row term, as in the paper's pseudo-code.

    Example:
        >>> nn, p = (F.normalize(torch.randn(4, 8)) for _ in range(2))
        >>> nnclr_symmetric_loss_func(nn, p).allclose(plain_nnclr(nn, p, 0.1))
        True
    """
    return nnclr_terms(nn, p, temperature, symmetric)[0]
