"""Communication between ranks. With one process no function communicates.

Values that every rank needs are gathered, with gradients if the loss trains through them. A table
with one row per sample is sharded over the R ranks: sample i is row ``i // R`` of the share of rank
``i % R``. An error on one rank ends the block of :func:`propagate_rank_errors` on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solo_ext.core.errors import UserError

_KNOWN = "_known_to_all_ranks"
_AT_ONCE = 2**26
"""Bytes of a table that :func:`join_shares` gathers at a time."""


def world_size() -> int:
    """Number of processes, 1 without a process group.

    >>> world_size()
    1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process, 0 without a process group.

    >>> rank()
    0
    """
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        # Every rank's loss depends on these rows, so their gradients add up; DDP's mean then gives
        # the gradient of the mean loss on the joined batch. Autograd may pass the same tensor to
        # other nodes, so reduce a copy.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.narrow(0, rank() * ctx.rows, ctx.rows)


def gather_with_gradient(x: Tensor) -> Tensor:
    """Gathers like :func:`gather`, but gradients flow back to every rank.

    >>> gather_with_gradient(torch.ones(4, 8, requires_grad=True)).shape
    torch.Size([4, 8])
    """
    if world_size() == 1:
        return x
    return _GatherWithGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def sum_over_ranks(x: Tensor) -> Tensor:
    """Sums a contiguous ``x`` over all ranks, in place and without gradient.

    >>> sum_over_ranks(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    if world_size() > 1:
        dist.all_reduce(x)
    return x


@torch.no_grad()
def max_over_ranks(x: Tensor) -> Tensor:
    """Takes the elementwise maximum of a contiguous ``x`` over all ranks, in place.

    >>> max_over_ranks(torch.tensor([3, 1]))
    tensor([3, 1])
    """
    if world_size() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


@torch.no_grad()
def broadcast_buffers(*modules: nn.Module) -> None:
    """Copies rank 0's buffers to all ranks; buffers such as running statistics differ by rank.

    >>> norm = nn.BatchNorm1d(3)
    >>> broadcast_buffers(norm)
    >>> norm.running_mean
    tensor([0., 0., 0.])
    """
    for module in modules if world_size() > 1 else ():
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


@torch.no_grad()
def gather(x: Tensor) -> Tensor:
    """Concatenates all ranks' ``x`` (N, ...) to (world_size * N, ...) by rank, without gradient.

    >>> gather(torch.arange(3))
    tensor([0, 1, 2])
    """
    if world_size() == 1:
        return x
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def gather_each(xs: Sequence[Tensor], *, gradient: bool = False) -> list[Tensor]:
    """Gathers several ``x`` (N, ...) of one shape, each as :func:`gather` does, in one collective.

    >>> z1, z2 = torch.zeros(4, 8), torch.ones(4, 8)
    >>> [tuple(z.shape) for z in gather_each([z1, z2])]
    [(4, 8), (4, 8)]
    """
    if world_size() == 1:
        return list(xs)
    joined = torch.stack(tuple(xs), dim=1)
    return list((gather_with_gradient(joined) if gradient else gather(joined)).unbind(1))


def share_of(table: Tensor, dim: int = 0) -> Tensor:
    """This rank's share of a table with an entry for every sample along ``dim``.

    >>> share_of(torch.arange(3))
    tensor([0, 1, 2])
    """
    return table.movedim(dim, 0)[rank() :: world_size()].movedim(0, dim)


def own_rows(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each sample (N,) is in this rank's share, and its row there, 0 for other samples.

    >>> own_rows(torch.tensor([4, 0]))
    (tensor([True, True]), tensor([4, 0]))
    """
    own = samples % world_size() == rank()
    return own, torch.where(own, samples // world_size(), 0)


def total(count: int, device: torch.device) -> int:
    """Sums a number over ranks; the host waits for the device.

    >>> total(32, torch.device("cpu"))
    32
    """
    return int(sum_over_ranks(torch.tensor(count, device=device)))


@torch.no_grad()
def join_shares(share: Tensor, dim: int = 0) -> Tensor:
    """Joins a sharded table in the host memory of rank 0; other ranks return their share.

    All ranks must call this. Devices hold some 64 MB of the joined table at a time.

    >>> table = torch.arange(6).view(3, 2)
    >>> join_shares(share_of(table)).equal(table)
    True
    """
    if world_size() == 1:
        return share
    ranks, rows = world_size(), share.movedim(dim, 0)
    shape = list(share.shape)
    shape[dim] = count = total(len(rows), share.device)
    whole = None if rank() else torch.empty(shape, dtype=share.dtype)
    # The shares of the last ranks may have one row less.
    longest = -(-count // ranks)
    step = max(1, _AT_ONCE // (ranks * max(1, rows[:1].nbytes)))
    for begin in range(0, longest, step):
        part = rows.new_zeros(min(step, longest - begin), *rows.shape[1:])
        own = rows[begin : begin + len(part)]
        part[: len(own)] = own
        joined = gather(part).view(ranks, *part.shape).transpose(0, 1).flatten(0, 1)
        if whole is not None:
            place = whole.movedim(dim, 0)[begin * ranks : (begin + step) * ranks]
            place.copy_(joined[: len(place)])
    return share if whole is None else whole


def gather_objects(own: Any) -> list[Any]:
    """Gathers one object per rank, in rank order; objects are pickled and should be small.

    >>> gather_objects({"rank": rank()})
    [{'rank': 0}]
    """
    if world_size() == 1:
        return [own]
    held: list[Any] = [None] * world_size()
    dist.all_gather_object(held, own)
    return held


class RankError(RuntimeError):
    """Another rank failed.

    >>> str(RankError("rank 1: ValueError: no image in the folder"))
    'rank 1: ValueError: no image in the folder'
    """


@contextlib.contextmanager
def propagate_rank_errors(device: torch.device, among: bool = True) -> Iterator[None]:
    """Context manager that ends its block on every rank if one rank raises an error in it.

    Otherwise the other ranks would wait in a collective until the process group's timeout. All
    ranks must call :func:`rank_barrier` before the block's collectives; a rank that fails joins the
    others in their next barrier and tells them why. Blocks may be nested.

    Args:
        device: a device whose tensors the process group can send.
        among: whether all ranks enter the block; if not, errors are not propagated.

    Raises:
        RankError: another rank failed; a UserError if that rank raised one.

    >>> with propagate_rank_errors(torch.device("cpu")):
    ...     raise UserError("this rank cannot read 'images/'")
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.UserError: this rank cannot read 'images/'
    """
    if not among or world_size() == 1:
        yield
        return
    try:
        yield
        rank_barrier(device)
    except Exception as error:
        if not getattr(error, _KNOWN, False):
            # If the process group itself failed, the other ranks already know.
            with contextlib.suppress(RuntimeError):
                _exchange(error, device)
        raise


def rank_barrier(device: torch.device) -> None:
    """Waits for all ranks in :func:`propagate_rank_errors`; raises the error of one that failed.

    >>> cpu = torch.device("cpu")
    >>> with propagate_rank_errors(cpu):
    ...     rank_barrier(cpu)
    ...     images = total(32, cpu)
    >>> images
    32
    """
    if world_size() > 1:
        _exchange(None, device)


def _exchange(own: Exception | None, device: torch.device) -> None:
    """Tells the other ranks about this rank's error, or raises the error of another rank."""
    if not max_over_ranks(torch.tensor(int(own is not None), device=device)):
        return
    said = gather_objects(own and (type(own).__name__, str(own), isinstance(own, UserError)))
    error = own
    if error is None:
        first, (kind, text, users) = next((r, what) for r, what in enumerate(said) if what)
        told = f"rank {first}: {text}" if users else f"rank {first}: {kind}: {text}"
        error = UserError(told) if users else RankError(told)
    setattr(error, _KNOWN, True)
    if own is None:
        raise error
