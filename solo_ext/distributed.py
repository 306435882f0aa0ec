"""Gathering over ``torch.distributed``; on one process every function is the identity."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        # Every rank's loss depends on these rows: their gradients add up. DDP's mean over
        # parameters then gives the gradient of the mean loss on the joined batch.
        # Summed in a copy: autograd may hand the same tensor to other nodes.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.narrow(0, rank() * ctx.rows, ctx.rows)


def gather_with_gradient(x: Tensor) -> Tensor:
    """Concatenates ``x`` of all ranks along the first axis; gradients flow to every rank.

    Args:
        x: (N, ...), of equal shape on every rank.

    Returns:
        (world_size * N, ...), rank by rank.
    """
    if world_size() == 1:
        return x
    return _GatherWithGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum of ``x`` of all ranks, without gradient; ``x`` is overwritten.

    Args:
        x: contiguous, of equal shape on every rank.
    """
    if world_size() > 1:
        dist.all_reduce(x)
    return x


@torch.no_grad()
def max_over_ranks(x: Tensor) -> Tensor:
    """Largest of ``x`` of all ranks, entry by entry, without gradient; ``x`` is overwritten.

    Args:
        x: contiguous, of equal shape on every rank.
    """
    if world_size() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


@torch.no_grad()
def broadcast_buffers(*modules: nn.Module) -> None:
    """Gives every rank the buffers of rank 0; running statistics differ between ranks."""
    if world_size() == 1:
        return
    for module in modules:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


@torch.no_grad()
def gather(x: Tensor) -> Tensor:
    """Concatenates ``x`` of all ranks along the first axis, without gradient.

    Args:
        x: (N, ...), of equal shape on every rank.

    Returns:
        (world_size * N, ...), rank by rank.
    """
    if world_size() == 1:
        return x
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size())
    ]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def gather_objects(own: Any) -> list[Any]:
    """What every rank has, rank by rank; through pickle, so small things only."""
    if world_size() == 1:
        return [own]
    held: list[Any] = [None] * world_size()
    dist.all_gather_object(held, own)
    return held
