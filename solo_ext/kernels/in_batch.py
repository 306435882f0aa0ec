"""Contrastive losses whose candidates are rows of the batch and learn as well.

The gradients are computed in the forward pass, block by block of anchors, so that no (N, K) matrix
is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.kernels.tables import tile_rows, tiles_of

Reduce = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps log-sum-exps (E, n) and positives' logits (n, P) to losses (n,) and notes (A, n)."""

_SAFE = 80.0
"""Exponents down to -80 stay normal numbers in fp32."""


def batch_contrast(
    anchors: Tensor,
    candidates: Tensor,
    excluded_columns: Tensor | None,
    positives: Tensor,
    inverse_temperature: float,
    powers: Sequence[float],
    reduce: Reduce,
    extra: Tensor | None = None,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean over anchors of a loss that depends on their similarities through log-sum-exps.

    ``loss = mean_i reduce(lse_i, s_i)``, ``lse_ei = log sum_k exp(p_e a_i . c_k / T)`` over the
    candidates that are not excluded. A row's loss depends on its own similarities only, so loss and
    gradients to anchors, candidates and positives are computed in blocks of rows.

    Args:
        anchors: (N, D), fp32 or fp64, rows of length at most 1.
        candidates: (K, D), likewise.
        excluded_columns: (N, m) columns that are no negatives of the anchor; none by default.
        positives: (N, P) logits of the positives.
        inverse_temperature: 1 / T.
        powers: (E,) values of p, above 0.
        reduce: differentiable and row by row; called once per block.
        extra: (E, N) log-sum-exps of further negatives, joined to the candidates'.
        tile: number of anchors per block; by default what suits the device's cache.

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
    if tile is None:
        tile = tile_rows(anchors, len(candidates), 16, share=4)
    if not torch.is_grad_enabled():
        anchors, candidates, positives = (x.detach() for x in (anchors, candidates, positives))
    settings = excluded_columns, inverse_temperature, tuple(powers), reduce, tile
    return _BatchContrast.apply(anchors, candidates, positives, extra, *settings)  # type: ignore[no-any-return, no-untyped-call]


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
        # If the similarities' known bound is small enough, it replaces each row's maximum.
        bounded = 2 * inverse_temperature * max(powers) <= _SAFE
        for part in tiles_of(count, tile):
            scaled = anchors[part] * inverse_temperature
            logits = scaled @ candidates.T
            if excluded_columns is not None:
                logits.scatter_(1, excluded_columns[part], float("-inf"))
            shift = logits.new_full((1, 1), inverse_temperature)
            if not bounded:
                shift = logits.amax(1, keepdim=True)
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
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if g is None else g * grad for g in ctx.gradients), *[None] * 5
