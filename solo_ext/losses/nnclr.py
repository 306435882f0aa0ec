"""The symmetric loss of NNCLR."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels import dispatch
from solo_ext.losses.common import LOSSES, check_positive, unit_rows
from solo_ext.losses.contrastive import (
    PLAIN,
    ContrastiveTerms,
    Mixing,
    NegativeEstimator,
    contrastive,
    own_columns,
    per_anchor,
    terms_of,
)


def plain_nnclr(nn: Tensor, p: Tensor, temperature: float, symmetric: bool = True) -> Tensor:
    """Eq. 3 and its transpose for unit rows of one process, on the (N, N) logits; the reference.

    Example:
        >>> nn, p = (F.normalize(torch.randn(4, 8)) for _ in range(2))
        >>> plain_nnclr(nn, p, temperature=0.1).shape
        torch.Size([])
    """
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
    """The loss, and the :class:`ContrastiveTerms` of its row term.

    Of several pairs of views, these are the means over the pairs, and the rows of all pairs.

    Args:
        nn: (N, D) nearest neighbours, or (P, N, D) those of P pairs.
        p: predictions of the other view, of the same shape.
        temperature: above 0.
        symmetric: as in :func:`nnclr_symmetric_loss_func`.
        estimator: of the mass of the negatives, which are the other samples.
        mixing: synthetic negatives of the row term, made of other samples' predictions.
        joined: unit rows of ``nn`` and of ``p``, (..., G, D) each, gathered from all processes with
            gradient, for callers that need them more than once, whose ``nn`` and ``p`` are unit
            rows too; by default all are normalised and gathered here. Pairs have to give them.

    Example:
        >>> loss, rows = nnclr_terms(torch.randn(4, 8), torch.randn(4, 8), temperature=0.1)
        >>> loss.shape, rows.losses.shape
        (torch.Size([]), torch.Size([4, 1]))
    """
    nn, p = unit_rows(nn=nn, p=p) if joined is None else full_precision(nn, p)

    def apart(nn: Tensor, p: Tensor) -> tuple[Tensor, ContrastiveTerms]:
        if nn.ndim == 3:
            whole = joined or (nn, p)
            parts = zip(nn, p, zip(*whole, strict=True), strict=True)
            return _mean(
                nnclr_terms(a, b, temperature, symmetric, estimator, mixing, joined=both)
                for a, b, both in parts
            )
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

    count = p.shape[-2]
    if not symmetric or mixing is not None or distributed.world_size() > 1 or count < 2:
        return apart(nn, p)
    check_positive(temperature=temperature)
    together = partial(_both_ways, temperature=temperature, estimator=estimator)
    forms: dict[dispatch.Form, Any] = {"plain": together, "tiles": apart}
    return dispatch.run("nnclr", forms, [nn, p], count, estimator)  # type: ignore[no-any-return]


def _mean(
    found: Iterable[tuple[Tensor, ContrastiveTerms]],
) -> tuple[Tensor, ContrastiveTerms]:
    """The means over pairs, and all rows of them."""
    losses, terms = zip(*found, strict=True)
    _, rows, *scalars = zip(*terms, strict=True)
    means = (torch.stack(each).mean() for each in scalars)
    return torch.stack(losses).mean(), ContrastiveTerms(
        torch.stack([t.loss for t in terms]).mean(), torch.cat(rows), *means
    )


def _both_ways(
    nn: Tensor, p: Tensor, temperature: float, estimator: NegativeEstimator
) -> tuple[Tensor, ContrastiveTerms]:
    """Row and column term of unit rows on one process, from one matrix of similarities a pair."""
    count = p.shape[-2]
    with full_precision_products(p.device):
        similar = nn @ p.mT / temperature
        positives = similar.diagonal(dim1=-2, dim2=-1).reshape(-1, 1)
        own = torch.eye(count, dtype=torch.bool, device=p.device)
        others = similar.masked_fill(own, float("-inf"))
        raised = [others if power == 1 else power * others for power in estimator.powers]
        both = torch.stack(raised) if len(raised) > 1 else others.unsqueeze(0)
        settings: Any = {"count": count - 1, "temperature": temperature}
        by_row, by_column = (both.logsumexp(dim).flatten(1) for dim in (-1, -2))
        rows, notes = per_anchor(by_row, positives, estimator=estimator, **settings)
        mass, _ = estimator(by_column, positives, **settings)
        row, nan = rows.mean(), rows.new_full((), math.nan)
        column = F.softplus(mass - positives.squeeze(1)).mean()
        return (row + column) / 2, terms_of(row, notes, nan, nan)


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
    2021), k over the batch. The column term has ``exp(nn_k.p_i / T)`` in the sum instead. The loss
    is the mean of both terms and over the samples.

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
