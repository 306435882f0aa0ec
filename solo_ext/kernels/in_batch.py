"""Contrastive losses whose candidates are rows of the batch and get a gradient as well.

The gradients are computed in the forward pass, so that no (N, K) matrix is kept for the backward
pass. The tiled form of :func:`batch_contrast` goes through blocks of anchors;
:func:`two_view_contrast` computes all at once if both views of a batch are on one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.dispatch import once_differentiable, tile_rows, tiles_of

Reduce = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps log-sum-exps (E, n) and positives' logits (n, P) to losses (n,) and notes (A, n)."""

_SAFE = 80.0
"""The exponential of a number down to -80 is a normal fp32 number."""


def batch_contrast(
    anchors: Tensor,
    candidates: Tensor,
    excluded_columns: Tensor | None,
    positives: Tensor,
    inverse_temperature: float,
    powers: Sequence[float],
    reduce: Reduce,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean over anchors of a loss that depends on their similarities through log-sum-exps.

    ``loss = mean_i reduce(lse_i, s_i)``, ``lse_ei = log sum_k exp(p_e a_i . c_k / T)`` over the
    candidates that are not excluded. A row's loss depends on its own similarities only, so loss and
    gradients to anchors, candidates and positives are computed in blocks of rows.

    Args:
        anchors: (N, D), fp32 or fp64, rows of length at most 1.
        candidates: (K, D), likewise.
        excluded_columns: (N, m) indices of candidates that are not negatives of the anchor; none by
            default.
        positives: (N, P) logits of the positives.
        inverse_temperature: 1 / T.
        powers: (E,) values of p, above 0.
        reduce: a differentiable function that treats each row by itself; called once per block.
        extra: (E, N) log-sum-exps of further negatives, which are added to the candidates.

    Returns:
        The scalar loss, and the (A, N) notes that ``reduce`` returns, without gradient.

    Example:
        InfoNCE of four anchors, each with one positive and eight candidates:

        >>> anchors, candidates = torch.randn(4, 3), torch.randn(8, 3)
        >>> positives = torch.randn(4, 1)
        >>> def info_nce(lse, positives):
        ...     losses = torch.nn.functional.softplus(lse[0] - positives[:, 0])
        ...     return losses, losses.unsqueeze(0)
        >>> loss, notes = batch_contrast(anchors, candidates, None, positives, 2.0, [1.0], info_nce)
        >>> logits = torch.cat((positives, 2.0 * anchors @ candidates.T), dim=1)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, torch.zeros(4).long()))
        True
        >>> notes.shape
        torch.Size([1, 4])
    """

    def plain(
        anchors: Tensor, candidates: Tensor, positives: Tensor, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = (anchors * inverse_temperature) @ candidates.T
        if excluded_columns is not None:
            logits = logits.scatter(1, excluded_columns, float("-inf"))
        lse = torch.stack([(p * logits).logsumexp(1) for p in powers])
        losses, notes = reduce(lse if extra is None else torch.logaddexp(lse, extra), positives)
        return losses.mean(), notes.detach()

    def tiles(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        tile = tile_rows(anchors, len(candidates), 16, share=4)
        settings = excluded_columns, inverse_temperature, tuple(powers), reduce, tile
        if not torch.is_grad_enabled():
            inputs = tuple(x.detach() for x in inputs)
        return _BatchContrast.apply(*inputs, *[None] * (4 - len(inputs)), *settings)  # type: ignore[no-any-return, no-untyped-call]

    inputs = [x for x in (anchors, candidates, positives, extra) if x is not None]
    forms: dict[dispatch.Form, Callable[..., tuple[Tensor, Tensor]]] = {
        "plain": plain,
        "tiles": tiles,
    }
    details = len(powers), excluded_columns is None
    return dispatch.run("batch_contrast", forms, inputs, len(candidates), *details)


class _BatchContrast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        candidates: Tensor,
        positives: Tensor,
        extra: Tensor | None,
        excluded_columns: Tensor | None,
        inverse_temperature: float,
        powers: tuple[float, ...],
        reduce: Reduce,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        learners = (anchors, candidates, positives, extra)
        gradients = [
            torch.empty_like(x) if needed and x is not None else None
            for x, needed in zip(learners, ctx.needs_input_grad, strict=False)
        ]
        to_anchors, to_candidates, to_positives, to_extra = gradients
        wanted = any(g is not None for g in gradients)
        count, total, notes = len(anchors), anchors.new_zeros(()), []
        # Logits are at most 1 / T. If that is small enough, subtract it in place of each row's
        # maximum.
        bounded = 2 * inverse_temperature * max(powers) <= _SAFE
        largest = anchors.new_full((1, 1), inverse_temperature)
        for part in tiles_of(count, tile):
            scaled = anchors[part] * inverse_temperature
            # With beta=0, addmm ignores its first argument.
            logits = torch.addmm(-largest, scaled, candidates.T, beta=int(bounded))
            if excluded_columns is not None:
                logits.scatter_(1, excluded_columns[part], float("-inf"))
            shift = largest if bounded else logits.amax(1, keepdim=True)
            if not bounded:
                logits -= shift
            # Overwrite the logits only for the last power: nothing needs them afterwards.
            weights = [(logits * p).exp_() for p in powers[:-1]]
            weights.append((logits if powers[-1] == 1 else logits.mul_(powers[-1])).exp_())
            sums = [w.sum(1) for w in weights]
            lse = torch.stack(
                [s.log() + shift.squeeze(1) * p for s, p in zip(sums, powers, strict=True)]
            )
            inputs = [lse, positives[part], *([] if extra is None else [extra[:, part]])]
            inputs = [x.detach().requires_grad_(wanted) for x in inputs]
            with torch.enable_grad():
                joined = inputs[0] if extra is None else torch.logaddexp(inputs[0], inputs[2])
                losses, note = reduce(joined, inputs[1])
                part_loss = losses.sum()
            total += part_loss.detach()
            notes.append(note.detach())
            if not wanted:
                continue
            to_lse, *found = torch.autograd.grad(
                part_loss, inputs, part_loss.new_full((), 1 / count), materialize_grads=True
            )
            if to_positives is not None:
                to_positives[part] = found[0]
            if to_extra is not None:
                to_extra[:, part] = found[1]
            # Turn the exponentials into the (n, K) gradient to the logits, in place.
            for w, s, g, p in zip(weights, sums, to_lse, powers, strict=True):
                w *= (g * p / s.clamp(min=torch.finfo(s.dtype).tiny)).unsqueeze(1)
            slopes = weights[0]
            for w in weights[1:]:
                slopes += w
            if to_anchors is not None:
                to_anchors[part] = (slopes @ candidates).mul_(inverse_temperature)
            if to_candidates is not None:
                # The buffer is uninitialised before the first block: beta = 0 overwrites it.
                to_candidates.addmm_(slopes.T, scaled, beta=1 if part.start else 0)
        ctx.gradients = gradients
        noted = torch.cat(notes, dim=1)
        ctx.mark_non_differentiable(noted)
        return total / count, noted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if g is None else g * grad for g in ctx.gradients), *[None] * 5


_SAFE_QUOTIENT = 60.0
"""Quotients and sums of exponentials of numbers between -60 and 0 stay in the range of fp32."""
_SHORTEST = 1e-12
"""Rows shorter than this are divided by it, as ``torch.nn.functional.normalize`` does."""


def two_view_fits(z: Tensor, inverse_temperature: float, beta: float) -> bool:
    """Whether :func:`two_view_contrast` supports a batch whose views have the shape of ``z``.

    Example:
        >>> two_view_fits(torch.zeros(64, 128), inverse_temperature=5.0, beta=0.0)
        True
    """
    return len(z) > 1 and 2 * (1 + beta) * inverse_temperature <= _SAFE_QUOTIENT


def two_view_contrast(
    z1: Tensor,
    z2: Tensor,
    inverse_temperature: float,
    tau_plus: float = 0.0,
    beta: float = 0.0,
    detach_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean loss over all rows of two views: the other view is the positive, the rest negatives.

    ``log(1 + M_i exp(-s_i))`` with s_i the similarity to the other view over the temperature and
    M_i the mass that :class:`solo_ext.losses.NegativeEstimator` estimates. The result is that of
    :func:`batch_contrast`, in half the time or less for small batches: anchors and candidates are
    the same rows, so one product gives all similarities and another all gradients.

    Args:
        z1, z2: (N, D), fp32 or fp64, of any scale; :func:`two_view_fits` must be true.
        inverse_temperature: 1 / T.
        tau_plus, beta, detach_weights: as in :class:`solo_ext.losses.NegativeEstimator`.

    Returns:
        The scalar loss; and without gradient the loss of each anchor (2, N), the mass times
        ``(1 - tau_plus) exp(-1 / T)`` (2, N), and whether the mass is above its floor (2, N).

    Example:
        >>> z1, z2 = torch.randn(8, 16), torch.randn(8, 16)
        >>> loss, *_ = two_view_contrast(z1, z2, inverse_temperature=2.0)
        >>> rows = torch.nn.functional.normalize(torch.cat((z1, z2)))
        >>> logits = (2.0 * rows @ rows.T).fill_diagonal_(float("-inf"))
        >>> loss.allclose(torch.nn.functional.cross_entropy(logits, torch.arange(16).roll(8)))
        True
    """
    if not torch.is_grad_enabled():
        z1, z2 = z1.detach(), z2.detach()
    return _TwoViews.apply(z1, z2, inverse_temperature, tau_plus, beta, detach_weights)  # type: ignore[no-any-return, no-untyped-call]


class _TwoViews(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z1: Tensor,
        z2: Tensor,
        inverse_temperature: float,
        tau: float,
        beta: float,
        detach_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        images = len(z1)
        count, rest = 2 * images - 2, 1 - tau
        rows = torch.cat((z1, z2))
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        divisors = lengths.clamp(min=_SHORTEST)
        rows.div_(divisors)
        # Logits minus their upper bound 1 / T.
        shift = rows.new_full((1, 1), -inverse_temperature)
        similar = torch.addmm(shift, rows, rows.T, alpha=inverse_temperature)
        own = _own(similar)
        positive = own[0, 1].exp()
        own.fill_(float("-inf"))
        # `low` is exp(beta s), not needed for beta = 0; `high` is exp((1 + beta) s). Both matrices
        # are symmetric.
        low: Tensor | None
        if beta == 1:
            # A square costs less than a second exponential.
            low = similar.exp_()
            high = low * low
        else:
            low = (similar * beta).exp_() if beta else None
            high = similar.exp_() if low is None else similar.exp_().mul_(low)
        sums = None if low is None else low.sum(1)
        ratio = high.sum(1) if sums is None else high.sum(1).div_(sums)
        mass = (ratio if sums is None else ratio * count).view(2, images)
        floor = count * math.exp(-2 * inverse_temperature) * rest if tau else 0.0
        if tau:
            mass.add_(positive, alpha=-tau * count)
        kept = mass > floor
        if tau:
            mass.clamp_(min=floor)
        # log1p keeps the digits of small losses, which log(...) - s would lose.
        losses = torch.div(mass, positive).mul_(1 / rest).log1p_()
        ctx.gradient = None
        ctx.mark_non_differentiable(losses, mass, kept)
        if any(ctx.needs_input_grad[:2]):
            # The gradients below are those of the summed losses, times (1 - tau); `factor` turns
            # them into those of the mean loss.
            total = torch.add(positive, mass, alpha=1 / rest)
            of_mass = torch.div(kept, total)
            of_positive = (mass / total).addcmul_(positive, of_mass, value=tau * count)
            of_pair = of_positive.sum(0).neg_()
            # `slope` is the gradient to the quotient of a row's two sums. A similarity occurs in
            # the sums of two rows and gets the gradients of both.
            slope = of_mass.view(-1)
            if sums is not None:
                slope = slope.div(sums).mul_(count)
            power = 1 if detach_weights else 1 + beta
            slopes = high.mul_((slope.unsqueeze(1) + slope).mul_(power))
            if low is not None and not detach_weights:
                less = slope.mul_(ratio).mul_(beta)
                slopes.sub_(low.mul_(less.unsqueeze(1) + less))
            own = _own(slopes)
            own[0, 1].copy_(of_pair)
            own[1, 0].copy_(of_pair)
            factor = inverse_temperature / (2 * images * rest)
            gradient = torch.addmm(shift, slopes, rows, beta=0, alpha=factor)
            # Backward pass of the normalisation: remove the component along the row, except for
            # rows whose length was clamped.
            along = torch.linalg.vecdot(gradient, rows).unsqueeze(1).mul_(lengths >= _SHORTEST)
            ctx.gradient = gradient.addcmul_(rows, along, value=-1).div_(divisors)
        return losses.mean(), losses, mass, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        views = (None, None) if ctx.gradient is None else (ctx.gradient * grad).chunk(2)
        return *views, *[None] * 4


def _own(similar: Tensor) -> Tensor:
    """(2, 2, N) view of the entries that compare two views of the same image."""
    images = len(similar) // 2
    return similar.view(2, images, 2, images).diagonal(dim1=1, dim2=3)
