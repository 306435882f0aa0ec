"""The symmetric loss of NNCLR."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.contrastive import (
    PLAIN,
    ContrastiveTerms,
    NegativeEstimator,
    contrastive,
    own_rows,
)
from solo_ext.losses.mochi import Mixing
from solo_ext.losses.registry import LOSSES


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

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.
    """
    if nn.ndim != 2 or nn.shape != p.shape:
        raise ValueError(
            f"nn and p must both be (N, D), got {tuple(nn.shape)} and {tuple(p.shape)}"
        )
    with full_precision_products(p.device):
        nn, p = (F.normalize(x, dim=1) for x in full_precision(nn, p))
    excluded_columns = own_rows(p)

    def direction(
        anchors: Tensor, targets: Tensor, candidates: Tensor | None, mixing: Mixing | None
    ) -> ContrastiveTerms:
        if candidates is None:
            candidates = distributed.gather_with_gradient(targets)
        return contrastive(
            anchors,
            targets.unsqueeze(1),
            candidates,
            excluded_columns=excluded_columns,
            estimator=estimator,
            mixing=mixing,
            temperature=temperature,
        )

    all_nn, all_p = joined or (None, None)
    rows = direction(nn, p, all_p, mixing)
    if not symmetric:
        return rows.loss, rows
    return (rows.loss + direction(p, nn, all_nn, None).loss) / 2, rows


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

    Row term ``-log(exp(nn_i.p_i / T) / sum_k exp(nn_i.p_k / T))`` (Eq. 3), k over the batch;
    column term the same with ``exp(nn_k.p_i / T)`` in the sum; half their sum, mean over the
    samples.

    Args:
        nn: (N, D) nearest neighbours of one view; normalised inside.
        p: (N, D) predictions of the other view; normalised inside.
        temperature: T, above 0.
        symmetric: ``False`` leaves the row term, as in the paper's pseudo-code.

    Returns:
        Scalar; zero that carries the graph for N = 1, where there is no negative.

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.

    Source:
        Dwibedi et al., ICCV 2021, arXiv 2104.14548.
    """
    return nnclr_terms(nn, p, temperature, symmetric)[0]
