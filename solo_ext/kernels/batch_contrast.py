"""A contrastive loss over candidates that learn, block of rows by block of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solo_ext.kernels.tiles import tile_rows

Reduce = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From masses (E, n) and logits of positives (n, P) to losses (n,) and notes (A, n)."""

_SAFE = 80.0
"""Exponents down to -80 stay normal numbers in fp32."""


class BatchContrast(NamedTuple):
    """What :func:`batch_contrast` gives.

    Attributes:
        loss: scalar mean over the anchors.
        notes: (A, N) what ``reduce`` says beside the losses, without gradient.
    """

    loss: Tensor
    notes: Tensor


def batch_contrast(
    anchors: Tensor,
    candidates: Tensor,
    excluded_columns: Tensor,
    positives: Tensor,
    inverse_temperature: float,
    powers: Sequence[float],
    reduce: Reduce,
    extra_masses: Tensor | None = None,
    tile: int | None = None,
) -> BatchContrast:
    """Mean over anchors of a loss that depends on their similarities through log-sum-exps.

    ``loss = mean_i reduce(lse_i, s_i)``, ``lse_ei = log sum_k exp(p_e a_i . c_k / T)`` over the
    candidates that are not the anchor's own. A row's loss depends on its own similarities
    alone: loss and gradients to anchors, candidates and positives are made block of rows by
    block of rows in the forward pass, and no (N, K) matrix is kept.

    Args:
        anchors: (N, D), fp32 or fp64, rows of length at most 1.
        candidates: (K, D), likewise.
        excluded_columns: (N, m) columns that are no negatives of the anchor.
        positives: (N, P) logits of the positives.
        inverse_temperature: 1 / T.
        powers: (E,) values of p, above 0.
        reduce: differentiable, row by row; called once per block.
        extra_masses: (E, N) log-sum-exps of further negatives, joined to the candidates'.
        tile: anchors at a time; by default what suits the device's cache.

    Raises:
        RuntimeError: it is differentiated twice.
    """
    if tile is None:
        tile = tile_rows(anchors, candidates.shape[0], 16, share=4)
    if not torch.is_grad_enabled():
        anchors, candidates, positives = (x.detach() for x in (anchors, candidates, positives))
    settings = inverse_temperature, tuple(powers), reduce, tile
    loss, notes = _BatchContrast.apply(  # type: ignore[no-untyped-call]
        anchors, candidates, excluded_columns, positives, extra_masses, *settings
    )
    return BatchContrast(loss, notes)


class _Gradients:
    """Gradients of the mean loss, as far as they are wanted; the blocks fill all of them."""

    def __init__(self, needs: Sequence[bool], tensors: Sequence[Tensor | None]) -> None:
        self.all = [
            torch.empty_like(t) if needed and t is not None else None
            for needed, t in zip(needs, tensors, strict=True)
        ]
        self.any = any(g is not None for g in self.all)


class _BatchContrast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        candidates: Tensor,
        excluded_columns: Tensor,
        positives: Tensor,
        extra: Tensor | None,
        inverse_temperature: float,
        powers: tuple[float, ...],
        reduce: Reduce,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad
        wanted = (needs[0], needs[1], needs[3], needs[4])
        gradients = _Gradients(wanted, (anchors, candidates, positives, extra))
        to_anchors, to_candidates, to_positives, to_extra = gradients.all
        total, notes = anchors.new_zeros(()), []
        count = anchors.shape[0]
        # Similarities have a bound, which spares a pass for the largest where it serves.
        bound = inverse_temperature * max(powers)
        for begin in range(0, count, tile):
            part = slice(begin, begin + tile)
            scaled = anchors[part] * inverse_temperature
            logits = scaled @ candidates.T
            logits.scatter_(1, excluded_columns[part], float("-inf"))
            shift: Tensor | float = inverse_temperature
            if 2 * bound > _SAFE:
                shift = logits.amax(1, keepdim=True)
            weights = [w.exp_() for w in _raised(logits, shift, powers)]
            sums = [w.sum(1) for w in weights]
            masses = torch.stack(
                [s.log() + _column(shift) * p for s, p in zip(sums, powers, strict=True)]
            )
            with torch.enable_grad():
                inputs = [masses, positives[part]]
                if extra is not None:
                    inputs.append(extra[:, part])
                inputs = [x.detach().requires_grad_(gradients.any) for x in inputs]
                joined = torch.logaddexp(inputs[0], inputs[2]) if extra is not None else inputs[0]
                losses, note = reduce(joined, inputs[1])
                found = (
                    torch.autograd.grad(losses.sum() / count, inputs, materialize_grads=True)
                    if gradients.any
                    else ()
                )
            total += losses.detach().sum()
            notes.append(note.detach())
            if not gradients.any:
                continue
            if to_positives is not None:
                to_positives[part] = found[1]
            if to_extra is not None:
                to_extra[:, part] = found[2]
            coefficients = _coefficients(weights, sums, found[0], powers)
            if to_anchors is not None:
                to_anchors[part] = (coefficients @ candidates).mul_(inverse_temperature)
            if to_candidates is not None:
                # What is there before the first block counts for nothing.
                to_candidates.addmm_(coefficients.T, scaled, beta=1 if begin else 0)
        ctx.gradients = gradients.all
        joined_notes = torch.cat(notes, dim=1) if len(notes) > 1 else notes[0]
        ctx.mark_non_differentiable(joined_notes)
        return total / count, joined_notes

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        anchors, candidates, positives, extra = (
            None if g is None else g * grad for g in ctx.gradients
        )
        return anchors, candidates, None, positives, extra, None, None, None, None


def _column(shift: Tensor | float) -> Tensor | float:
    return shift.squeeze(1) if isinstance(shift, Tensor) else shift


def _raised(logits: Tensor, shift: Tensor | float, powers: Sequence[float]) -> list[Tensor]:
    """``p (logits - shift)`` for every power; the logits are overwritten."""
    logits -= shift
    last = len(powers) - 1
    return [
        (logits.mul_(p) if p != 1 else logits) if e == last else logits * p
        for e, p in enumerate(powers)
    ]


def _coefficients(
    weights: list[Tensor], sums: list[Tensor], gradients: Tensor, powers: Sequence[float]
) -> Tensor:
    """(n, K) gradient to the logits; the weights are overwritten."""
    whole: Tensor | None = None
    for w, s, g, p in zip(weights, sums, gradients, powers, strict=True):
        w *= (g * p / s.clamp(min=torch.finfo(s.dtype).tiny)).unsqueeze(1)
        whole = w if whole is None else whole.add_(w)
    assert whole is not None
    return whole
