"""Contrastive losses of views, of queues and of the batch: InfoNCE, NT-Xent, debiased and hard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels import (
    BOUND,
    TwoViewContrast,
    batch_contrast,
    bounded_logsumexp,
    mixed_logsumexp,
    table_logsumexp,
    two_view_contrast,
    two_view_fits,
)
from solo_ext.losses.registry import LOSSES

if TYPE_CHECKING:
    from solo_ext.losses.mochi import Mixing


class Mass(NamedTuple):
    """An estimate, anchor by anchor.

    Attributes:
        log_mass: (N,) log of the sum of exponentials that the negatives stand for.
        floored: (N,) bool, whether it sits on its floor and passes no gradient on.
    """

    log_mass: Tensor
    floored: Tensor


@dataclass(frozen=True)
class NegativeEstimator:
    """Estimate of the summed exponentials of true negatives, from samples that are not all true.

    ``N max((R - tau_plus P) / (1 - tau_plus), exp(-1 / T))`` with ``R`` the mean of
    ``exp(s_k)`` over the N candidates, weighted by ``exp(beta s_k)``, ``P`` that over the
    positives, and s the cosine over the temperature T: plain with ``tau_plus = beta = 0``,
    debiased with ``beta = 0``, hard with both.

    Args:
        tau_plus: in [0, 1), share of candidates that are of the anchor's own class.
        beta: 0 or more, concentration on the candidates most similar to the anchor.
        detach_weights: no gradient through the weights.

    Raises:
        ValueError: an argument is out of range.

    Source:
        Chuang et al., NeurIPS 2020, arXiv 2007.00224, Eq. 7 and 8; Robinson et al., ICLR 2021,
        arXiv 2010.04592.
    """

    tau_plus: float = 0.0
    beta: float = 0.0
    detach_weights: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tau_plus < 1:
            raise ValueError(f"tau_plus={self.tau_plus}: must lie in [0, 1)")
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta={self.beta}: must be 0 or more")

    @property
    def powers(self) -> tuple[float, ...]:
        """Powers of ``exp(s)`` whose log-sum-exp over the candidates the estimate needs."""
        return (1 + self.beta, self.beta) if self.beta else (1.0,)

    def __call__(self, lse: Tensor, positives: Tensor, count: int, temperature: float) -> Mass:
        """The estimate from log-sum-exps.

        Args:
            lse: (E, N) over the candidates, one row for each of :attr:`powers`.
            positives: (N, P) samples of the positives, cosine over temperature.
            count: number of candidates, above 0.
            temperature: above 0.
        """
        log_count = math.log(count)
        mass = self._weighted(lse, log_count)
        if not self.tau_plus:
            return Mass(mass, torch.zeros_like(mass, dtype=torch.bool))
        if self.beta and positives.shape[1] > 1:
            both = [(power * positives).logsumexp(1) for power in self.powers]
            own = self._weighted(torch.stack(both), log_count)
        else:
            own = positives.logsumexp(1) + (log_count - math.log(positives.shape[1]))
        # Exponentials relative to the larger of the two: none overflows, and the difference
        # loses nothing that the original form would keep.
        pivot = torch.maximum(mass, own).detach()
        rest = ((mass - pivot).exp() - self.tau_plus * (own - pivot).exp()) / (1 - self.tau_plus)
        above_zero = rest > 0
        estimate = pivot + torch.where(above_zero, rest, 1.0).log()
        floor = log_count - 1 / temperature
        floored = ~above_zero | (estimate <= floor)
        return Mass(torch.where(floored, floor, estimate), floored.detach())

    def _weighted(self, lse: Tensor, log_count: float) -> Tensor:
        if not self.beta:
            return lse[0]
        hard, weights = lse.unbind()
        if self.detach_weights:
            # The slope of exp(s) alone, weights held fixed.
            hard = hard.detach() + (hard - hard.detach()) / (1 + self.beta)
            weights = weights.detach()
        return hard - weights + log_count


PLAIN = NegativeEstimator()
"""Every candidate is a negative and counts once."""


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
    excluded_columns: Tensor | None = None,
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
        excluded_columns: (N, m) columns of the candidates that are no negatives of the anchor:
            itself and its positives. ``None``: all are negatives.
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
        excluded_columns is not None
        or candidates.requires_grad
        or (mixing is not None and mixing.count)
    ):
        raise ValueError(
            f"compute_dtype={compute_dtype}: is for a queue that is not mixed; leave it out"
        )
    _check(anchors, positives, candidates, excluded_columns, mixing, temperature, extra_positives)
    anchors, positives, candidates = full_precision(anchors, positives, candidates)
    excluded = 0 if excluded_columns is None else excluded_columns.shape[1]
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
        in_batch = excluded_columns is not None or candidates.requires_grad
        if mixing is not None and mixing.count:
            mixtures = mixed_logsumexp(
                anchors,
                candidates.detach(),
                1 / temperature,
                mixing.draws,
                min(mixing.num_hard, candidates.shape[0] - excluded),
                estimator.powers,
                excluded_columns=excluded_columns,
                with_table=not in_batch,
                ranked=mixing.ranked,
            )
        if in_batch:
            if excluded_columns is None:
                excluded_columns = torch.empty(
                    (len(anchors), 0), dtype=torch.long, device=anchors.device
                )
            loss, notes = batch_contrast(
                anchors,
                candidates,
                excluded_columns,
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
    excluded_columns: Tensor | None,
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
    if excluded_columns is not None and (
        excluded_columns.ndim != 2 or excluded_columns.shape[0] != rows[0]
    ):
        raise ValueError(
            f"excluded_columns must be ({rows[0]}, m), got {tuple(excluded_columns.shape)}"
        )
    if extra is not None and (extra.ndim != 3 or (extra.shape[0], extra.shape[2]) != rows):
        raise ValueError(
            f"extra_positives must be ({rows[0]}, M, {rows[1]}), got {tuple(extra.shape)}"
        )
    check_temperature(temperature)
    if mixing is not None and mixing.draws.alpha.shape[0] != rows[0]:
        raise ValueError(
            f"mixing: draws for {mixing.draws.alpha.shape[0]} anchors, there are {rows[0]}"
        )


class BatchOfViews(NamedTuple):
    """Views of a batch, as :func:`contrastive` takes them.

    Attributes:
        anchors: (V N, D) this process's views, one after the other.
        positives: (V N, V - 1, D) the other views of each anchor's image.
        candidates: (V G, D) the views of all processes, gathered with gradient.
        excluded_columns: (V N, V) the columns of each anchor's image.
    """

    anchors: Tensor
    positives: Tensor
    candidates: Tensor
    excluded_columns: Tensor


def batch_of_views(views: Sequence[Tensor]) -> BatchOfViews:
    """Every view of every image against all views of all other images.

    Args:
        views: V times (N, D), of any scale, V at least 2.

    Raises:
        ValueError: fewer than two views, or shapes that differ or are not (N, D).
    """
    check_views(views)
    with full_precision_products(views[0].device):
        local = F.normalize(torch.stack(full_precision(*views)), dim=-1)
    number, rows = local.shape[:2]
    # (N, V, D) gathers rank by rank; (V, G, D) keeps each view's rows together.
    joined = distributed.gather_with_gradient(local.transpose(0, 1)).transpose(0, 1)
    others = [
        torch.stack([local[u] for u in range(number) if u != v], dim=1) for v in range(number)
    ]
    first = torch.arange(rows, device=local.device) + distributed.rank() * rows
    offsets = torch.arange(number, device=local.device) * joined.shape[1]
    excluded_columns = (first.unsqueeze(1) + offsets).repeat(number, 1)
    return BatchOfViews(
        local.flatten(0, 1), torch.cat(others), joined.flatten(0, 1), excluded_columns
    )


def check_views(views: Sequence[Tensor]) -> None:
    """Refuses what are no views of one batch.

    Raises:
        ValueError: fewer than two views, or shapes that differ or are not (N, D).
    """
    shapes = [tuple(z.shape) for z in views]
    if len(views) < 2 or len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ValueError(f"at least two views, all (N, D), are needed, got {shapes}")


def own_rows(anchors: Tensor) -> Tensor:
    """(N, 1) columns of this process's rows among those gathered from all processes.

    Args:
        anchors: (N, D), of equal shape on every rank.
    """
    rows = anchors.shape[0]
    first = torch.arange(rows, device=anchors.device) + distributed.rank() * rows
    return first.unsqueeze(1)


def two_view_terms(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator = PLAIN
) -> ContrastiveTerms:
    """Each view of each image against its other view and all views of all other images.

    As :func:`solo_ext.losses.contrastive` of a :func:`solo_ext.losses.batch_of_views`; in fewer
    operations where the batch is of this process alone and small enough.

    Args:
        z1: (N, D) first view; normalised inside.
        z2: (N, D) second view; normalised inside.
        temperature: above 0.
        estimator: of the mass of the negatives.

    Raises:
        ValueError: shapes differ or are not (N, D), or the temperature is not positive.
    """
    found = _at_once(z1, z2, temperature, estimator)
    if found is None:
        return _in_blocks(z1, z2, temperature, estimator)
    factor = math.log((1 - estimator.tau_plus) * (2 * len(z1) - 2))
    hardness = found.mass.log().mean().mul_(temperature).add_(1 - temperature * factor)
    if found.kept is None:
        floored = hardness.new_zeros(())
    else:
        floored = 1 - found.kept.mean(dtype=hardness.dtype)
    nan = hardness.new_full((), math.nan)
    return ContrastiveTerms(found.loss, found.losses.view(-1, 1), floored, hardness, nan, nan)


def two_view_loss(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator = PLAIN
) -> Tensor:
    """The loss of :func:`two_view_terms` alone."""
    found = _at_once(z1, z2, temperature, estimator)
    return (_in_blocks(z1, z2, temperature, estimator) if found is None else found).loss


def _at_once(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator
) -> TwoViewContrast | None:
    check_views((z1, z2))
    check_temperature(temperature)
    if distributed.world_size() > 1:
        return None
    with full_precision_products(z1.device):
        z1, z2 = full_precision(z1, z2)
        if not two_view_fits(z1, 1 / temperature, estimator.beta):
            return None
        return two_view_contrast(
            z1,
            z2,
            1 / temperature,
            estimator.tau_plus,
            estimator.beta,
            estimator.detach_weights,
        )


def _in_blocks(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator
) -> ContrastiveTerms:
    batch = batch_of_views((z1, z2))
    return contrastive(**batch._asdict(), estimator=estimator, temperature=temperature)


@LOSSES.register(
    "nt_xent_loss_func",
    paper="A Simple Framework for Contrastive Learning of Visual Representations",
    year=2020,
    arxiv="2002.05709",
)
def nt_xent_loss_func(z1: Tensor, z2: Tensor, temperature: float = 0.5) -> Tensor:
    """Normalised temperature-scaled cross-entropy of each view against all others.

    ``-log(exp(s+) / (exp(s+) + sum_k exp(s_k)))``, s the cosine over the temperature, k over the
    2N - 2 other samples of both views; mean over the 2N anchors (Eq. 1).

    Args:
        z1: (N, D) first view; normalised inside.
        z2: (N, D) second view; normalised inside.
        temperature: above 0.

    Returns:
        Scalar; zero that carries the graph for N = 1, where there is no negative.

    Raises:
        ValueError: shapes differ or are not (N, D), or the temperature is not positive.

    Source:
        Chen et al., ICML 2020, arXiv 2002.05709.
    """
    return two_view_loss(z1, z2, temperature)


@LOSSES.register(
    "info_nce_loss_func",
    paper="Momentum Contrast for Unsupervised Visual Representation Learning",
    year=2019,
    arxiv="1911.05722",
)
def info_nce_loss_func(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor,
    temperature: float = 0.2,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross-entropy of each query's positive against negatives that all queries share.

    ``-log(exp(q.k+ / T) / (exp(q.k+ / T) + sum_j exp(q.n_j / T)))``, mean over the queries
    (Eq. 1).

    Args:
        query: (N, D); normalised inside.
        positive: (N, D), row i is of query i; normalised inside.
        negatives: (K, D), unit rows, used as they are; K may be 0.
        temperature: T, above 0.
        compute_dtype: of the factors of the products with constant negatives, ``torch.bfloat16``
            for example; fp32 by default.

    Returns:
        Scalar; zero that carries the graph without negatives.

    Raises:
        ValueError: shapes do not fit, or the temperature is not positive.

    Source:
        He et al., CVPR 2020, arXiv 1911.05722; van den Oord et al., 2018, arXiv 1807.03748.
    """
    shapes(query, positive, negatives)
    with full_precision_products(query.device):
        query, positive = (F.normalize(x, dim=1) for x in full_precision(query, positive))
    return contrastive(
        query,
        positive.unsqueeze(1),
        negatives,
        temperature=temperature,
        compute_dtype=compute_dtype,
    ).loss


def shapes(query: Tensor, positive: Tensor, negatives: Tensor) -> None:
    """Refuses what does not fit together.

    Raises:
        ValueError: with the shapes.
    """
    if query.ndim != 2 or query.shape != positive.shape:
        raise ValueError(
            f"query and positive must both be (N, D), got {tuple(query.shape)} and "
            f"{tuple(positive.shape)}"
        )
    if negatives.ndim != 2 or negatives.shape[1] != query.shape[1]:
        raise ValueError(
            f"negatives must be (K, {query.shape[1]}) like the query, got {tuple(negatives.shape)}"
        )


def estimated_terms(
    z1: Tensor,
    z2: Tensor,
    temperature: float,
    estimator: NegativeEstimator,
    more_positives: Tensor | None = None,
) -> ContrastiveTerms:
    """Two views against each other and the batch, by an estimate of the negatives' mass.

    Args:
        z1: (N, D) first view; normalised inside.
        z2: (N, D) second view; normalised inside.
        temperature: above 0.
        estimator: of the mass.
        more_positives: (N, M - 1, D) further views of the images, which only make the estimate
            better; normalised inside.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.
    """
    if more_positives is None:
        return two_view_terms(z1, z2, temperature, estimator)
    batch = batch_of_views((z1, z2))
    if more_positives.ndim != 3 or more_positives.shape[::2] != z1.shape:
        raise ValueError(
            f"more_positives must be ({z1.shape[0]}, M - 1, {z1.shape[1]}), got "
            f"{tuple(more_positives.shape)}"
        )
    with full_precision_products(z1.device):
        extra = F.normalize(full_precision(more_positives)[0].to(batch.anchors), dim=2)
    return contrastive(
        **batch._asdict(),
        estimator=estimator,
        temperature=temperature,
        extra_positives=extra.repeat(2, 1, 1),
    )


def estimated_loss(
    z1: Tensor,
    z2: Tensor,
    temperature: float,
    estimator: NegativeEstimator,
    more_positives: Tensor | None = None,
) -> Tensor:
    """The loss of :func:`estimated_terms` alone."""
    if more_positives is None:
        return two_view_loss(z1, z2, temperature, estimator)
    return estimated_terms(z1, z2, temperature, estimator, more_positives).loss


@LOSSES.register(
    "debiased_loss_func",
    paper="Debiased Contrastive Learning",
    year=2020,
    arxiv="2007.00224",
)
def debiased_loss_func(
    z1: Tensor,
    z2: Tensor,
    temperature: float = 0.5,
    tau_plus: float = 0.1,
    more_positives: Tensor | None = None,
) -> Tensor:
    """Contrastive loss whose negatives are corrected for those of the anchor's own class.

    ``-log(exp(s+) / (exp(s+) + N g))`` with
    ``g = max((mean_k exp(s_k) - tau_plus mean_m exp(s_m)) / (1 - tau_plus), exp(-1 / T))``
    (Eq. 7 and 8), s the cosine over the temperature T, k over the N = 2B - 2 other samples of both
    views, m over the M positives; mean over the 2B anchors. ``tau_plus=0`` is NT-Xent.

    Args:
        z1: (B, D) first view; normalised inside.
        z2: (B, D) second view; normalised inside.
        temperature: above 0. The estimate was tuned for 0.5; at 0.2 and below most anchors of
            ``tau_plus=0.1`` sit on the floor.
        tau_plus: in [0, 1), the share of negatives that are of the anchor's class; 1 / number
            of classes where these are balanced.
        more_positives: (B, M - 1, D) further views of the images, of which the estimate takes
            the mean together with the positive; normalised inside. ``None`` is M = 1.

    Returns:
        Scalar; zero that carries the graph for B = 1, where there is no negative.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Chuang et al., NeurIPS 2020, arXiv 2007.00224.
    """
    return estimated_loss(z1, z2, temperature, NegativeEstimator(tau_plus), more_positives)


@LOSSES.register(
    "hard_negative_loss_func",
    paper="Contrastive Learning with Hard Negative Samples",
    year=2021,
    arxiv="2010.04592",
)
def hard_negative_loss_func(
    z1: Tensor,
    z2: Tensor,
    temperature: float = 0.5,
    tau_plus: float = 0.1,
    beta: float = 1.0,
    detach_weights: bool = False,
    more_positives: Tensor | None = None,
) -> Tensor:
    """Debiased contrastive loss whose negatives weigh the more the more similar they are.

    ``-log(exp(s+) / (exp(s+) + N g))`` with
    ``g = max((R - tau_plus P) / (1 - tau_plus), exp(-1 / temperature))``,
    ``R = sum_k exp((1 + beta) s_k) / sum_k exp(beta s_k)`` (Eq. 4, importance sampling from
    ``exp(beta s)``) over the N = 2B - 2 other samples of both views, P likewise over the
    positives, s the cosine over the temperature; mean over the 2B anchors. ``beta=0`` is the
    debiased loss, ``beta=tau_plus=0`` NT-Xent.

    Args:
        z1: (B, D) first view; normalised inside.
        z2: (B, D) second view; normalised inside.
        temperature: above 0; beta multiplies similarities that are already divided by it.
        tau_plus: in [0, 1), the share of negatives that are of the anchor's class.
        beta: 0 or more, concentration on the hardest.
        detach_weights: no gradient through the weights ``exp(beta s)``; by default there is one,
            as in the official code. The value is the same.
        more_positives: (B, M - 1, D) as in :func:`debiased_loss_func`.

    Returns:
        Scalar; zero that carries the graph for B = 1, where there is no negative.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Robinson et al., ICLR 2021, arXiv 2010.04592.
    """
    estimator = NegativeEstimator(tau_plus, beta, detach_weights)
    return estimated_loss(z1, z2, temperature, estimator, more_positives)
