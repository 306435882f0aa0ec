"""The contrastive loss that debiased, hard, mixed and nearest-neighbour variants share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels import (
    BOUND,
    batch_contrast,
    bounded_logsumexp,
    mixed_logsumexp,
    table_logsumexp,
)
from solo_ext.losses.mixing import Mixing
from solo_ext.losses.negative_mass import PLAIN, NegativeEstimator


class ContrastiveTerms(NamedTuple):
    """The loss and what a user needs to judge it; all but the loss without gradient.

    Attributes:
        loss: scalar mean over anchors and their positives.
        losses: (N, P) of each anchor with each of its positives.
        floored: scalar in [0, 1], share of anchors whose estimate sits on its floor and whose
            negatives therefore get no gradient.
        hardness: scalar, the cosine at which all negatives together would weigh what they are
            estimated to, mean over the anchors.
        mined: scalar, mean cosine of the negatives that are mixed; NaN without mixing.
        mixed: scalar, mean cosine of the mixtures; NaN without mixing.
    """

    loss: Tensor
    losses: Tensor
    floored: Tensor
    hardness: Tensor
    mined: Tensor
    mixed: Tensor


def contrastive(
    anchors: Tensor,
    positives: Tensor,
    candidates: Tensor,
    *,
    own: Tensor | None = None,
    estimator: NegativeEstimator = PLAIN,
    mixing: Mixing | None = None,
    temperature: float,
    extra_positives: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> ContrastiveTerms:
    """Contrasts each anchor's positives with candidates, by an estimate of their negative mass.

    ``-log(exp(s_p) / (exp(s_p) + M))``, s the cosine over the temperature, ``M`` the
    ``estimator``'s mass of the candidates that are not the anchor's own and of the mixtures;
    mean over positives and anchors. InfoNCE with the default estimator.

    Works on what this process holds: gather candidates first, with gradient where they learn, and
    the mean over processes is the loss of one process on the joined batch. No matrix of anchors
    by candidates is kept, and the gradient is made in the forward pass.

    Args:
        anchors: (N, D) unit rows.
        positives: (N, P, D) unit rows, P above 0.
        candidates: (K, D) unit rows, used as they are: those of the batch, or a queue.
        own: (N, m) columns of the candidates that are no negatives of the anchor: itself and its
            positives. ``None``: all are negatives.
        estimator: of the mass of the negatives.
        mixing: synthetic negatives, made of candidates; constants to the gradient.
        temperature: above 0.
        extra_positives: (N, M, D) unit rows, further samples of the positives, which only make
            the debiased estimate better.
        compute_dtype: of the factors of products with a queue that is not mixed,
            ``torch.bfloat16`` for example; fp32 by default.

    Returns:
        The terms; without negatives the loss is zero that carries the graph.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.
    """
    if compute_dtype is not None and (
        own is not None or candidates.requires_grad or (mixing is not None and mixing.count)
    ):
        raise ValueError(
            f"compute_dtype={compute_dtype}: is for a queue that is not mixed; leave it out"
        )
    _check(anchors, positives, candidates, own, mixing, temperature, extra_positives)
    anchors, positives, candidates = full_precision(anchors, positives, candidates)
    excluded = 0 if own is None else own.shape[1]
    count = candidates.shape[0] - excluded
    if mixing is not None and count > 0:
        count += mixing.count
    with full_precision_products(anchors.device):
        similar = torch.einsum("nd,npd->np", anchors, positives) / temperature
        targets, nan = similar.shape[1], anchors.new_full((), math.nan)
        if count <= 0 or not anchors.shape[0]:
            nothing = anchors.sum() + positives.sum() + candidates.sum()
            if extra_positives is not None:
                nothing = nothing + extra_positives.sum()
            zero = anchors.new_zeros(())
            losses = torch.zeros_like(similar)
            return ContrastiveTerms(nothing * 0, losses.detach(), zero, nan, nan, nan)
        if extra_positives is not None:
            more = torch.einsum("nd,nmd->nm", anchors, extra_positives.to(anchors)) / temperature
            similar = torch.cat((similar, more), 1)

        def reduce(lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
            mass, floored = estimator(lse, logits, count, temperature)
            losses = F.softplus(mass.unsqueeze(1) - logits[:, :targets])
            hardness = (mass - math.log(count)) * temperature
            notes = torch.stack((floored.to(mass.dtype), hardness))
            return losses.mean(1), torch.cat((notes, losses.T)).detach()

        mixtures = None
        in_batch = own is not None or candidates.requires_grad
        if mixing is not None and mixing.count:
            mixtures = mixed_logsumexp(
                anchors,
                candidates.detach(),
                1 / temperature,
                mixing.draws,
                min(mixing.num_hard, candidates.shape[0] - excluded),
                estimator.powers,
                own=own,
                with_table=not in_batch,
                ranked=mixing.ranked,
            )
        if in_batch:
            if own is None:
                own = torch.empty((len(anchors), 0), dtype=torch.long, device=anchors.device)
            loss, notes = batch_contrast(
                anchors,
                candidates,
                own,
                similar,
                1 / temperature,
                estimator.powers,
                reduce,
                None if mixtures is None else mixtures.lse,
            )
        else:
            if mixtures is not None:
                lse = mixtures.lse
            elif max(estimator.powers) / temperature <= BOUND:
                lse = bounded_logsumexp(
                    anchors,
                    candidates,
                    1 / temperature,
                    estimator.powers,
                    compute_dtype=compute_dtype,
                )
            else:
                scale = anchors.new_full((), 1 / temperature)
                lse, _ = table_logsumexp(
                    anchors,
                    candidates,
                    scale,
                    powers=estimator.powers,
                    compute_dtype=compute_dtype,
                )
            per_anchor, notes = reduce(lse, similar)
            loss = per_anchor.mean()
    floored, hardness = notes[:2].mean(1).unbind()
    mined, mixed = nan, nan
    if mixtures is not None:
        mined, mixed = mixtures.hardest.mean(), mixtures.mixed.mean()
    return ContrastiveTerms(loss, notes[2:].T, floored, hardness, mined, mixed)


def check_temperature(temperature: float) -> None:
    """Refuses a temperature that is none.

    Raises:
        ValueError: it is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")


def _check(
    anchors: Tensor,
    positives: Tensor,
    candidates: Tensor,
    own: Tensor | None,
    mixing: Mixing | None,
    temperature: float,
    extra: Tensor | None,
) -> None:
    rows = tuple(anchors.shape)
    if anchors.ndim != 2 or positives.ndim != 3 or (positives.shape[0], positives.shape[2]) != rows:
        raise ValueError(
            f"anchors must be (N, D) and positives (N, P, D), got {rows} and "
            f"{tuple(positives.shape)}"
        )
    if not positives.shape[1]:
        raise ValueError(f"positives={tuple(positives.shape)}: each anchor needs at least one")
    if candidates.ndim != 2 or candidates.shape[1] != rows[1]:
        raise ValueError(
            f"candidates must be (K, {rows[1]}) like the anchors, got {tuple(candidates.shape)}"
        )
    if own is not None and (own.ndim != 2 or own.shape[0] != rows[0]):
        raise ValueError(f"own must be ({rows[0]}, m), got {tuple(own.shape)}")
    if extra is not None and (extra.ndim != 3 or (extra.shape[0], extra.shape[2]) != rows):
        raise ValueError(
            f"extra_positives must be ({rows[0]}, M, {rows[1]}), got {tuple(extra.shape)}"
        )
    check_temperature(temperature)
    if mixing is not None and mixing.draws.alpha.shape[0] != rows[0]:
        raise ValueError(
            f"mixing: draws for {mixing.draws.alpha.shape[0]} anchors, there are {rows[0]}"
        )
