"""The contrastive family: NT-Xent, debiased, hard-negative, and InfoNCE with any candidates.

Each loss is ``-log(exp(s+) / (exp(s+) + N g))``, with s the cosine over the temperature. They
differ in what the N negatives are, and in g, which estimates the mean of exp(s) over them.
:func:`plain_contrastive` is the formula; :func:`contrastive` computes the same in log space, by
fused kernels. The named losses at the end apply it to two views of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels import dispatch
from solo_ext.kernels.in_batch import batch_contrast, two_view_contrast, two_view_fits
from solo_ext.kernels.mixed_logsumexp import MixDraws, mixed_logsumexp
from solo_ext.kernels.normalized import normalized
from solo_ext.kernels.tables import table_logsumexp
from solo_ext.losses.common import LOSSES, check_positive, check_rows, check_table


def plain_contrastive(
    anchors: Tensor,
    positives: Tensor,
    candidates: Tensor,
    excluded_columns: Tensor | None = None,
    *,
    temperature: float,
    tau_plus: float = 0.0,
    beta: float = 0.0,
) -> Tensor:
    """The formula on the whole matrix of similarities; tests compare all other forms with it.

    Shapes as in :func:`contrastive`, settings as in :class:`NegativeEstimator`.

    Example:
        >>> query, key, queue = (F.normalize(torch.randn(n, 4)) for n in (2, 2, 9))
        >>> plain_contrastive(query, key.unsqueeze(1), queue, temperature=0.2).shape
        torch.Size([])
    """
    s_pos = torch.einsum("nd,npd->np", anchors, positives) / temperature  # (N, P)
    s_neg = anchors @ candidates.T / temperature  # (N, K)
    counted = torch.ones_like(s_neg)
    if excluded_columns is not None:
        counted = counted.scatter(1, excluded_columns, 0.0)

    def mean_exp(s: Tensor, counted: Tensor) -> Tensor:
        weights = counted * torch.exp(beta * s)  # hard negatives, Eq. 4; beta = 0 makes them 1
        return (weights * torch.exp(s)).sum(1) / weights.sum(1)

    g = mean_exp(s_neg, counted)
    if tau_plus > 0:  # debiased, Eq. 7 and 8
        g = (g - tau_plus * mean_exp(s_pos, torch.ones_like(s_pos))) / (1 - tau_plus)
        g = g.clamp(min=math.exp(-1 / temperature))
    mass = (counted.sum(1) * g).unsqueeze(1)
    return -torch.log(s_pos.exp() / (s_pos.exp() + mass)).mean()


@dataclass(frozen=True)
class NegativeEstimator:
    """Estimates the mass (sum of exp(s)) of true negatives from candidates with false ones.

    ``N max((R - tau_plus P) / (1 - tau_plus), exp(-1 / T))``, where ``R`` is the mean of
    ``exp(s_k)`` over the N candidates, weighted by ``exp(beta s_k)``, ``P`` the same mean over the
    positives, and s the cosine over the temperature T. With ``tau_plus = beta = 0`` it is plain
    InfoNCE, with ``beta = 0`` debiased (Chuang et al., arXiv 2007.00224, Eq. 7 and 8), with both
    settings it weights hard negatives (Robinson et al., arXiv 2010.04592, Eq. 4).

    Args:
        tau_plus: in [0, 1), expected share of candidates that have the anchor's class.
        beta: 0 or more, concentration on the candidates most similar to the anchor.
        detach_weights: whether the weights get no gradient.

    Example:
        If ten candidates and the positive all have the logit 1, the mass is ``10 exp(1)``:

        >>> lse = torch.full((1, 1), math.log(10) + 1)
        >>> mass, clamped = NegativeEstimator(0.1)(lse, torch.ones(1, 1), 10, temperature=0.5)
        >>> mass.allclose(lse[0]), clamped
        (True, tensor([False]))
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
        """Powers p for which the estimate needs ``log sum_k exp(p s_k)`` over the candidates."""
        return (1 + self.beta, self.beta) if self.beta else (1.0,)

    def __call__(
        self, lse: Tensor, positives: Tensor, count: int | Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log of the estimate (N,), and whether it is clamped to its floor (N,), from log-sum-exps.

        Args:
            lse: (E, N) over the candidates, one row for each of :attr:`powers`.
            positives: (N, P) logits of the positives: cosine over temperature.
            count: number of candidates, above 0; (N,) if it differs between anchors.
            temperature: above 0.
        """
        log_count = _log(count)
        mass = self._weighted(lse, log_count)
        if not self.tau_plus:
            return mass, torch.zeros_like(mass, dtype=torch.bool)
        if self.beta and positives.shape[1] > 1:
            both = [(power * positives).logsumexp(1) for power in self.powers]
            own = self._weighted(torch.stack(both), log_count)
        else:
            own = positives.logsumexp(1) + (log_count - math.log(positives.shape[1]))
        # Divide both masses by the larger one, so that neither exponential overflows and the
        # difference keeps all digits.
        pivot = torch.maximum(mass, own).detach()
        rest = ((mass - pivot).exp() - self.tau_plus * (own - pivot).exp()) / (1 - self.tau_plus)
        above_zero = rest > 0
        estimate = pivot + torch.where(above_zero, rest, 1.0).log()
        floor = log_count - 1 / temperature
        clamped = ~above_zero | (estimate <= floor)
        return torch.where(clamped, floor, estimate), clamped.detach()

    def _weighted(self, lse: Tensor, log_count: float | Tensor) -> Tensor:
        if not self.beta:
            return lse[0]
        hard, weights = lse.unbind()
        if self.detach_weights:
            # Scale the gradient to that of exp(s) alone, as if the weights were constants.
            hard = hard.detach() + (hard - hard.detach()) / (1 + self.beta)
            weights = weights.detach()
        return hard - weights + log_count


PLAIN = NegativeEstimator()
"""Plain InfoNCE: every candidate is a negative and counts once."""


@dataclass(frozen=True)
class Mixing:
    """Synthetic negatives of MoCHi (Kalantidis et al., NeurIPS 2020, arXiv 2010.01028).

    Args:
        num_hard: number of hardest candidates (most similar to the anchor) to mix from; all
            candidates if there are fewer.
        draws: indices and coefficients of the mixtures; see
            :func:`solo_ext.losses.mochi.draw_mixes`.
        ranked: whether index 0 must be the hardest candidate; random indices need no order.

    Example:
        >>> from solo_ext.losses import draw_mixes
        >>> anchors, queue = (F.normalize(torch.randn(n, 8)) for n in (4, 100))
        >>> mixing = Mixing(16, draw_mixes(anchors, 16, num_pair_mixes=5, num_query_mixes=2))
        >>> terms = contrastive(anchors, anchors[:, None], queue, mixing=mixing, temperature=0.2)
        >>> terms.losses.shape
        torch.Size([4, 1])
    """

    num_hard: int
    draws: MixDraws
    ranked: bool = True

    def __post_init__(self) -> None:
        check_positive(num_hard=self.num_hard)
        # Check shapes only: checking values would wait for the device.
        pairs, alpha, singles, beta = (tuple(x.shape) for x in self.draws)
        if pairs != (*alpha, 2) or singles != beta or len(alpha) != 2 or alpha[0] != beta[0]:
            raise ValueError(
                f"draws={pairs}, {alpha}, {singles}, {beta}: must be (N, s, 2), (N, s), (N, s') "
                "and (N, s')"
            )

    @property
    def count(self) -> int:
        """Number of synthetic negatives of each anchor."""
        return self.draws.alpha.shape[1] + self.draws.beta.shape[1]


class ContrastiveTerms(NamedTuple):
    """The loss and the values that show how it behaves; only the loss has a gradient.

    Attributes:
        loss: scalar mean over anchors and their positives.
        losses: (N, P) of each anchor with each of its positives.
        clamped: scalar in [0, 1], share of anchors whose estimate is clamped to its floor, so that
            their negatives get no gradient.
        hardness: scalar, mean over anchors of an effective cosine: if every negative had it, their
            mass would equal the estimate.
        mined: scalar, mean cosine of the hardest candidates, which are mixed; NaN without mixing.
        mixed: scalar, mean cosine of the mixtures; NaN without mixing.

    Example:
        >>> query, table = torch.eye(2, 4), torch.eye(4)
        >>> terms = contrastive(query, query.unsqueeze(1), table, temperature=0.2)
        >>> terms.loss.shape, terms.losses.shape, terms.clamped, terms.mined
        (torch.Size([]), torch.Size([2, 1]), tensor(0.), tensor(nan))
    """

    loss: Tensor
    losses: Tensor
    clamped: Tensor
    hardness: Tensor
    mined: Tensor
    mixed: Tensor


def contrastive(
    anchors: Tensor,
    positives: Tensor,
    candidates: Tensor,
    *,
    excluded_columns: Tensor | None = None,
    anchor_ids: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    estimator: NegativeEstimator = PLAIN,
    mixing: Mixing | None = None,
    temperature: float,
    compute_dtype: torch.dtype | None = None,
) -> ContrastiveTerms:
    """Contrasts each anchor's positives with candidates, whose mass an estimator computes.

    ``-log(exp(s_p) / (exp(s_p) + M))``, s the cosine over the temperature, ``M`` the
    ``estimator``'s mass of the candidates that are not excluded and of the mixtures; mean over
    positives and anchors. The default estimator gives InfoNCE. The debiased estimate averages over
    all positives of an anchor; the paper calls their number M.

    Nothing is gathered here: gather the candidates first, with gradient if they need one. The mean
    of the loss over ranks is then the loss of one process on the joined batch.

    Args:
        anchors: (N, D) unit rows.
        positives: (N, P, D) unit rows, P above 0.
        candidates: (K, D) unit rows of the batch or a queue; they are not normalised again.
        excluded_columns: (N, m) indices of candidates that are not negatives of the anchor: the
            anchor itself and its positives. ``None``: all are negatives.
        anchor_ids: (N,) or (N, m) integers, such as sample indices; a queue's candidates with one
            of the anchor's ids, such as earlier keys of its image, are not its negatives.
        candidate_ids: (K,) ids of the candidates; only together with ``anchor_ids``.
        estimator: of the mass of the negatives.
        mixing: synthetic negatives made of candidates, without gradient.
        temperature: above 0.
        compute_dtype: dtype of the factors in products with a queue, ``torch.bfloat16`` for
            example; fp32 by default. Not with mixing or with candidates of the batch.

    Returns:
        The terms; if there are no negatives, the loss is a differentiable zero.

    Example:
        >>> query, key, queue = (F.normalize(torch.randn(n, 4)) for n in (2, 2, 9))
        >>> terms = contrastive(query, key.unsqueeze(1), queue, temperature=0.2)
        >>> expected = plain_contrastive(query, key.unsqueeze(1), queue, temperature=0.2)
        >>> terms.loss.allclose(expected), terms.losses.shape
        (True, torch.Size([2, 1]))
    """
    _check(anchors, positives, candidates, excluded_columns, mixing, temperature)
    in_batch = excluded_columns is not None or candidates.requires_grad
    mixing = mixing if mixing is not None and mixing.count else None
    if compute_dtype is not None and (in_batch or mixing is not None):
        raise ValueError(
            f"compute_dtype={compute_dtype}: is for a queue that is not mixed; leave it out"
        )
    if (anchor_ids is None) != (candidate_ids is None) or (anchor_ids is not None and in_batch):
        raise ValueError(
            "anchor_ids and candidate_ids: give both, with a queue's candidates, or neither"
        )
    anchors, positives, candidates = full_precision(anchors, positives, candidates)
    available = len(candidates) - (0 if excluded_columns is None else excluded_columns.shape[1])
    nan = mined = mixed = anchors.new_full((), math.nan)
    with full_precision_products(anchors.device, or_tf32=in_batch):
        similar = torch.einsum("nd,npd->np", anchors, positives) / temperature
        if available <= 0 or not len(anchors):
            nothing = 0 * (anchors.sum() + positives.sum() + candidates.sum())
            zero, zeros = anchors.new_zeros(()), torch.zeros_like(similar)
            return ContrastiveTerms(nothing, zeros, zero, nan, nan, nan)
        count: int | Tensor = available + (mixing.count if mixing is not None else 0)
        if anchor_ids is not None and candidate_ids is not None:
            count = (count - _number_with_ids(anchor_ids, candidate_ids)).to(anchors.dtype)

        reduce = partial(per_anchor, estimator=estimator, count=count, temperature=temperature)
        # Each case has its own kernel; tests compare all of them with plain_contrastive.
        scale, powers = 1 / temperature, estimator.powers
        lse: Tensor | None = None
        if mixing is not None:
            hardest = min(mixing.num_hard, available)
            lse, *cosines = mixed_logsumexp(
                anchors,
                candidates.detach(),
                scale,
                mixing.draws,
                hardest,
                powers,
                excluded_columns=excluded_columns,
                query_ids=anchor_ids,
                table_ids=candidate_ids,
                with_table=not in_batch,
                ranked=mixing.ranked,
            )
            mined, mixed = (x.mean() for x in cosines)
        elif not in_batch:
            lse, _ = table_logsumexp(
                anchors,
                candidates,
                scale,
                powers=powers,
                query_ids=anchor_ids,
                table_ids=candidate_ids,
                unit=True,
                compute_dtype=compute_dtype,
            )
        if in_batch:
            loss, notes = batch_contrast(
                anchors, candidates, excluded_columns, similar, scale, powers, reduce, lse
            )
        else:
            assert lse is not None
            losses, notes = reduce(lse, similar)
            loss = losses.mean()
    return terms_of(loss, notes, mined, mixed)


def _number_with_ids(anchor_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """(N,) number of candidates (K,) that have one of the anchor's ids, (N,) or (N, m)."""
    held, ids = candidate_ids.sort().values, anchor_ids.view(len(anchor_ids), -1).sort().values
    last, first = (torch.searchsorted(held, ids, right=right) for right in (True, False))
    # Count an id once, although an anchor may have it twice.
    again = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
    return (last - first).masked_fill(again, 0).sum(1)


def _log(count: int | Tensor) -> Any:
    return count.log() if isinstance(count, Tensor) else math.log(count)


def per_anchor(
    lse: Tensor,
    similar: Tensor,
    *,
    estimator: NegativeEstimator,
    count: int | Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Losses (N,) and notes for :func:`terms_of`, from log-sum-exps (E, N) of the negatives.

    The losses are means over an anchor's positives, whose logits are ``similar`` (N, P).

    Example:
        >>> lse, similar = torch.zeros(1, 4), torch.zeros(4, 1)
        >>> losses, notes = per_anchor(lse, similar, estimator=PLAIN, count=9, temperature=0.2)
        >>> losses, notes.shape
        (tensor([0.6931, 0.6931, 0.6931, 0.6931]), torch.Size([3, 4]))
    """
    log_mass, clamped = estimator(lse, similar, count, temperature)
    losses = F.softplus(log_mass.unsqueeze(1) - similar)
    hardness = (log_mass - _log(count)) * temperature
    notes = torch.stack((clamped.to(losses.dtype), hardness))
    return losses.mean(1), torch.cat((notes, losses.T)).detach()


def terms_of(loss: Tensor, notes: Tensor, mined: Tensor, mixed: Tensor) -> ContrastiveTerms:
    """Assembles the terms from a loss, the notes of :func:`per_anchor` and the mean cosines.

    Example:
        >>> nan = torch.tensor(math.nan)
        >>> terms_of(torch.tensor(0.5), torch.rand(3, 4), nan, nan).losses.shape
        torch.Size([4, 1])
    """
    clamped, hardness = notes[:2].mean(1).unbind()
    return ContrastiveTerms(loss, notes[2:].T, clamped, hardness, mined, mixed)


def _check(
    anchors: Tensor,
    positives: Tensor,
    candidates: Tensor,
    excluded_columns: Tensor | None,
    mixing: Mixing | None,
    temperature: float,
) -> None:
    rows = tuple(anchors.shape)
    if anchors.ndim != 2 or positives.ndim != 3 or (positives.shape[0], positives.shape[2]) != rows:
        raise ValueError(
            f"anchors must be (N, D) and positives (N, P, D), got {rows} and "
            f"{tuple(positives.shape)}"
        )
    if not positives.shape[1]:
        raise ValueError(f"positives={tuple(positives.shape)}: each anchor needs at least one")
    check_table("candidates", candidates, anchors)
    own = excluded_columns
    if own is not None and (own.ndim != 2 or len(own) != rows[0]):
        raise ValueError(f"excluded_columns must be ({rows[0]}, m), got {tuple(own.shape)}")
    if mixing is not None and len(mixing.draws.alpha) != rows[0]:
        raise ValueError(
            f"mixing: draws for {len(mixing.draws.alpha)} anchors, there are {rows[0]}"
        )
    check_positive(temperature=temperature)


class BatchOfViews(NamedTuple):
    """Views of a batch, in the form of the arguments of :func:`contrastive`.

    Attributes:
        anchors: (V N, D) the rows of this process, view after view.
        positives: (V N, V - 1, D) the other views of each anchor's image.
        candidates: (V G, D) the views of all processes, gathered with gradient.
        excluded_columns: (V N, V) the candidates that show the anchor's own image.

    Example:
        >>> batch = batch_of_views([torch.randn(5, 3)] * 2)
        >>> batch.anchors.shape, batch.candidates.shape
        (torch.Size([10, 3]), torch.Size([10, 3]))
    """

    anchors: Tensor
    positives: Tensor
    candidates: Tensor
    excluded_columns: Tensor


def batch_of_views(views: Sequence[Tensor]) -> BatchOfViews:
    """Prepares to contrast every view of an image with all views of all other images.

    Args:
        views: V times (N, D), of any scale, V at least 2.

    Example:
        >>> batch = batch_of_views([torch.randn(5, 3), torch.randn(5, 3)])
        >>> [tuple(x.shape) for x in batch]
        [(10, 3), (10, 1, 3), (10, 3), (10, 2)]
        >>> contrastive(**batch._asdict(), temperature=0.5).loss.shape
        torch.Size([])
    """
    if len(views) < 2:
        raise ValueError(f"views={len(views)}: at least two are needed")
    check_rows(**{f"views[{v}]": view for v, view in enumerate(views)})
    local = normalized(torch.stack(full_precision(*views)))
    number = len(views)
    # Gathering joins along the first dimension, which must therefore be N, not V.
    joined = distributed.gather_with_gradient(local.transpose(0, 1)).transpose(0, 1)
    others = [
        torch.stack([local[u] for u in range(number) if u != v], dim=1) for v in range(number)
    ]
    offsets = torch.arange(number, device=local.device) * joined.shape[1]
    excluded_columns = (own_columns(views[0]) + offsets).repeat(number, 1)
    return BatchOfViews(
        local.flatten(0, 1), torch.cat(others), joined.flatten(0, 1), excluded_columns
    )


def own_columns(rows: Tensor) -> Tensor:
    """(N, 1) indices of this process's N rows among the rows gathered from all processes.

    Example:
        >>> own_columns(torch.randn(3, 8)).flatten()
        tensor([0, 1, 2])
    """
    first = len(rows) * distributed.rank()
    return torch.arange(first, first + len(rows), device=rows.device).unsqueeze(1)


def two_view_terms(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator = PLAIN
) -> ContrastiveTerms:
    """:func:`contrastive` for two views (N, D), normalised inside, of the joined batch.

    If the batch is on one process, a kernel for this case can do it in fewer operations.

    Example:
        >>> terms = two_view_terms(torch.randn(4, 8), torch.randn(4, 8), temperature=0.5)
        >>> terms.loss.shape, terms.losses.shape
        (torch.Size([]), torch.Size([8, 1]))
    """
    check_rows(z1=z1, z2=z2)
    check_positive(temperature=temperature)
    z1, z2 = full_precision(z1, z2)

    def in_blocks(z1: Tensor, z2: Tensor) -> ContrastiveTerms:
        batch = batch_of_views((z1, z2))
        return contrastive(**batch._asdict(), estimator=estimator, temperature=temperature)

    if distributed.world_size() > 1 or not two_view_fits(z1, 1 / temperature, estimator.beta):
        return in_blocks(z1, z2)
    at_once = partial(_at_once, temperature=temperature, estimator=estimator)
    forms: dict[dispatch.Form, Callable[..., ContrastiveTerms]] = {
        "plain": at_once,
        "tiles": in_blocks,
    }
    # The inputs have N rows, but all 2N rows are compared: four times as many pairs as N x N.
    return dispatch.run("two_views", forms, [z1, z2], 4 * len(z1), estimator)


def _at_once(
    z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator
) -> ContrastiveTerms:
    tau_plus = estimator.tau_plus
    settings = tau_plus, estimator.beta, estimator.detach_weights
    with full_precision_products(z1.device, or_tf32=True):
        loss, losses, mass, kept = two_view_contrast(z1, z2, 1 / temperature, *settings)
    log_count = math.log((1 - tau_plus) * (2 * len(z1) - 2))
    hardness = mass.log().mean().mul_(temperature).add_(1 - temperature * log_count)
    clamped, nan = 1 - kept.mean(dtype=loss.dtype), loss.new_full((), math.nan)
    return ContrastiveTerms(loss, losses.view(-1, 1), clamped, hardness, nan, nan)


@LOSSES.register(
    "nt_xent_loss_func",
    paper="A Simple Framework for Contrastive Learning of Visual Representations",
    year=2020,
    arxiv="2002.05709",
)
def nt_xent_loss_func(z1: Tensor, z2: Tensor, temperature: float = 0.5) -> Tensor:
    """NT-Xent: temperature-scaled cross-entropy of each view against all other samples.

    ``-log(exp(s+) / (exp(s+) + sum_k exp(s_k)))``, s the cosine over the temperature, k over the
    2N - 2 other samples of both views; mean over the 2N anchors (Eq. 1 of Chen et al., ICML 2020).

    Args:
        z1, z2: (N, D) views; normalised inside.
        temperature: above 0.

    Example:
        >>> z1, z2 = torch.randn(8, 16), torch.randn(8, 16)
        >>> nt_xent_loss_func(z1, z2).allclose(
        ...     plain_contrastive(*batch_of_views((z1, z2)), temperature=0.5)
        ... )
        True
    """
    return two_view_terms(z1, z2, temperature).loss


@LOSSES.register(
    "debiased_loss_func", paper="Debiased Contrastive Learning", year=2020, arxiv="2007.00224"
)
def debiased_loss_func(
    z1: Tensor, z2: Tensor, temperature: float = 0.5, tau_plus: float = 0.1
) -> Tensor:
    """Contrastive loss that is corrected for false negatives, which share the anchor's class.

    ``-log(exp(s+) / (exp(s+) + N g))`` with
    ``g = max((mean_k exp(s_k) - tau_plus exp(s+)) / (1 - tau_plus), exp(-1 / T))``, s the cosine
    over the temperature T, k over the N = 2B - 2 other samples of both views; mean over the 2B
    anchors (Eq. 7 and 8 with M = 1 of Chuang et al., NeurIPS 2020). ``tau_plus=0`` is NT-Xent. For
    M > 1 pass a :func:`batch_of_views` of more than two views to :func:`contrastive`.

    Args:
        z1, z2: (B, D) views; normalised inside.
        temperature: above 0. The estimate was tuned for 0.5; at 0.2 and below, the estimates of
            most anchors are clamped to the floor if ``tau_plus=0.1``.
        tau_plus: in [0, 1), the share of negatives that have the anchor's class; 1 / number of
            classes if these are balanced.

    Example:
        >>> z1, z2 = torch.randn(8, 16), torch.randn(8, 16)
        >>> debiased_loss_func(z1, z2, tau_plus=0.1).allclose(
        ...     plain_contrastive(*batch_of_views((z1, z2)), temperature=0.5, tau_plus=0.1)
        ... )
        True
    """
    return two_view_terms(z1, z2, temperature, NegativeEstimator(tau_plus)).loss


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
) -> Tensor:
    """Debiased contrastive loss that weights negatives by their similarity to the anchor.

    ``-log(exp(s+) / (exp(s+) + N g))`` with
    ``g = max((R - tau_plus exp(s+)) / (1 - tau_plus), exp(-1 / temperature))``,
    ``R = sum_k exp((1 + beta) s_k) / sum_k exp(beta s_k)`` over the N = 2B - 2 other samples of
    both views, s the cosine over the temperature; mean over the 2B anchors (Eq. 4, importance
    sampling from ``exp(beta s)``, of Robinson et al., ICLR 2021). ``beta=0`` is the debiased loss,
    ``beta=tau_plus=0`` NT-Xent.

    Args:
        z1, z2: (B, D) views; normalised inside.
        temperature: above 0; beta multiplies similarities that are already divided by it.
        tau_plus: in [0, 1), the share of negatives that have the anchor's class.
        beta: 0 or more, concentration on the hardest negatives.
        detach_weights: whether the weights ``exp(beta s)`` get no gradient; by default they get
            one, as in the official code. The value is the same.

    Example:
        >>> z1, z2 = torch.randn(8, 16), torch.randn(8, 16)
        >>> hard_negative_loss_func(z1, z2, tau_plus=0.1, beta=1.0).allclose(plain_contrastive(
        ...     *batch_of_views((z1, z2)), temperature=0.5, tau_plus=0.1, beta=1.0
        ... ))
        True
    """
    estimator = NegativeEstimator(tau_plus, beta, detach_weights)
    return two_view_terms(z1, z2, temperature, estimator).loss
