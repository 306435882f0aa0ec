"""The rows to cluster, which may be spread over ranks, and sums over them without rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from solo_ext.core.distributed import gather, rank, rank_barrier, world_size
from solo_ext.core.draws import permutation

# Elements of a tile of scores, which should fit in the cache of a CPU, or keep a GPU busy. Only the
# CPU's value is measured.
_TILE = {"cpu": 2**19, "cuda": 2**24}
_MOST_ROWS = {"cpu": 2**12, "cuda": 2**15}
_FEWEST_ROWS = 256
_ROW_BLOCK = 64
# Bytes of a block of rows; a device holds one block at a time. The values are not measured.
_BLOCK_BYTES = {"cpu": 2**28, "cuda": 2**30}


def tile_rows(width: int, device: torch.device) -> int:
    """Number of rows per tile of ``width`` >= 1 columns: a multiple of 64, at least 256.

    Example:
        >>> tile_rows(1000, torch.device("cpu")) % 64
        0
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    rows = min(_TILE[kind] // width, _MOST_ROWS[kind]) // _ROW_BLOCK * _ROW_BLOCK
    return max(rows, _FEWEST_ROWS)


def read_rows(features: Tensor, which: slice | Tensor, device: torch.device) -> Tensor:
    """Some of the rows (n, D), by a slice or by indices (m,), on the device that computes.

    Features may be on another device or in a mapped file, and larger than the device's memory.
    Therefore only this function reads them, a tile or a block at a time.

    Example:
        >>> read_rows(torch.eye(3), torch.tensor([2, 0]), torch.device("cpu"))
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    if isinstance(which, slice):
        return features[which].to(device)
    return features.index_select(0, which.to(features.device)).to(device)


def blocks(
    features: Tensor, device: torch.device, rows: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The rows (n, D) in order, with their slices; one empty block if there are no rows.

    Without ``rows``, blocks are large, for callers that read rows several times or out of order:
    within a block they do so in memory, and a mapped file is still read once, from beginning to
    end.

    Example:
        >>> [(part, len(block)) for part, block in blocks(torch.zeros(5, 8), torch.device("cpu"))]
        [(slice(0, 5, None), 5)]
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    size = rows or max(1, _BLOCK_BYTES[kind] // max(1, features[:1].nbytes))
    for start in range(0, max(1, len(features)), size):
        part = slice(start, min(len(features), start + size))
        yield part, read_rows(features, part, device)


@dataclass(frozen=True)
class Rows:
    """The rows of this process, with the number and the range of the rows of all ranks.

    Attributes:
        features: (n, D) rows of this process, on any device; read them by :func:`read_rows`.
        ids: (n,) int64, their indices among all rows, on the device that computes.
        total: number of rows of all ranks.
        largest: largest absolute value of all rows, or a bound on it.
        shared: whether the rows are spread over ranks.

    Example:
        >>> rows = rows_of(torch.randn(10, 4), None, sharded=False)
        >>> rows.drawn(3, seed=0).features.shape
        torch.Size([3, 4])
    """

    features: Tensor
    ids: Tensor
    total: int
    largest: float
    shared: bool

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.ids.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation: fp64 for fp64 features, else fp32."""
        return torch.float64 if self.features.dtype == torch.float64 else torch.float32

    def sum(self, x: Tensor) -> Tensor:
        """Sums ``x`` over all ranks, in place."""
        return self._over_ranks(dist.all_reduce, x)

    def max(self, x: Tensor) -> Tensor:
        """Takes the maximum of ``x`` over all ranks, in place."""
        return self._over_ranks(dist.all_reduce, x, op=dist.ReduceOp.MAX)

    def from_first(self, x: Tensor) -> Tensor:
        """Copies ``x`` of rank 0 to all ranks, in place."""
        return self._over_ranks(dist.broadcast, x, src=0)

    def _over_ranks(self, collective: Callable[..., Any], x: Tensor, **options: Any) -> Tensor:
        if self.shared:
            rank_barrier(x.device)
            collective(x, **options)
        return x

    def select(self, wanted: Tensor) -> Tensor:
        """(K, D) rows of all ranks by their distinct ids (K,), in the dtype of the computation."""
        ascending, order = wanted.to(self.device).sort()
        own, place = self._among(ascending)
        width, device = self.features.shape[1], self.device
        found = torch.zeros(len(wanted), width, dtype=self.dtype, device=device)
        found[order[place]] = read_rows(self.features, own, device).to(self.dtype)
        # Each row is on one rank and zero on the others, so the sum is that row.
        return self.sum(found)

    def drawn(self, count: int, seed: int) -> Rows:
        """Draws ``count`` rows without replacement, the same for any spread over ranks.

        They keep their order, get new ids and are on the device that computes. If there are no more
        than ``count`` rows, this returns ``self``.
        """
        if count >= self.total:
            return self
        lots = torch.from_numpy(permutation(self.total, seed)(np.arange(count)))
        own, place = self._among(lots.sort().values.to(self.device))
        width = self.features.shape[1]
        sample = self.features.new_empty(len(own), width, device=self.device)
        size = tile_rows(max(1, width), self.device)
        parts = torch.split(sample, size), torch.split(own, size)
        for part, which in zip(*parts, strict=True):
            part.copy_(read_rows(self.features, which, self.device))
        return replace(self, features=sample, ids=place, total=count)

    def _among(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of this process's rows whose ids are in ascending ``numbers``, and where."""
        place = torch.searchsorted(numbers, self.ids).clamp_max_(len(numbers) - 1)
        own = (numbers[place] == self.ids).nonzero()[:, 0]
        return own, place.index_select(0, own)


def rows_of(
    features: Tensor, row_ids: Tensor | None, sharded: bool, device: torch.device | None = None
) -> Rows:
    """Checks the rows, and finds the number of rows and the largest value over all ranks.

    Args:
        features: (n, D), floating; n may be 0 on a rank.
        row_ids: (n,) integers, over all ranks each of 0 to N - 1 once; by default in the order of
            ranks.
        sharded: whether every rank holds a share of the rows.
        device: the device that computes; by default that of the features.

    Raises:
        ValueError: features are not 2-D, floating or finite; or the number of ids differs, or ids
            are out of range or repeated, which their sum shows if they are on different ranks.
            All ranks raise it if values are not finite or the sum is wrong.

    Example:
        >>> rows_of(torch.tensor([[1.0], [-3.0]]), None, sharded=False).largest
        3.0
    """
    if features.ndim != 2 or not features.dtype.is_floating_point:
        raise ValueError(
            f"features have the shape {tuple(features.shape)} and the dtype {features.dtype}; "
            "pass a floating (n, D) matrix"
        )
    if row_ids is not None and row_ids.shape != features.shape[:1]:
        raise ValueError(
            f"row_ids have the shape {tuple(row_ids.shape)}; pass one for each of the "
            f"{len(features)} rows of features"
        )
    shared, device = sharded and world_size() > 1, device or features.device
    count = torch.tensor([len(features)], device=device)
    if shared:
        rank_barrier(device)
        count = gather(count)
    total = int(count.sum())
    if row_ids is None:
        first = int(count[: rank()].sum()) if shared else 0
        row_ids = torch.arange(first, first + len(features), device=device)
    else:
        row_ids, seen = row_ids.to(device), torch.zeros(total, dtype=torch.bool, device=device)
        seen[row_ids[(row_ids >= 0) & (row_ids < total)]] = True
        if wrong := len(row_ids) - int(seen.sum()):
            raise _misnumbered(total, f"{wrong} of a process are repeated or out of range")
    rows = Rows(features.detach(), row_ids, total, 0.0, shared)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    # Sum the number of non-finite rows and the ids in a single all-reduce.
    both = torch.zeros(2, dtype=torch.int64, device=device)
    both[1] = row_ids.sum()
    size = tile_rows(max(1, features.shape[1]), device)
    for _, tile in blocks(features, device, size) if len(features) else ():
        of_rows = tile.abs().amax(1)
        both[0] += (~of_rows.isfinite()).sum()
        largest = torch.maximum(largest, of_rows.amax().double())
    broken, numbers = rows.sum(both).tolist()
    if broken:
        raise ValueError(
            f"features: {broken} rows hold NaN or infinity; every value must be finite. A "
            "network that diverges gives such features: lower the learning rate"
        )
    if numbers != total * (total - 1) // 2:
        raise _misnumbered(total, "some of one process are repeated on another")
    return replace(rows, largest=float(rows.max(largest)))


def _misnumbered(total: int, found: str) -> ValueError:
    return ValueError(
        f"row_ids: {found}; number all rows from 0 to {total - 1} once, over all ranks. A sampler "
        "that repeats rows to fill up the last batch does not"
    )


# fp64 holds every integer up to 2**53. Two bits are reserved for sums of twice as many terms, which
# occur while rows move from one cluster to another.
_BITS = 51


def exact_scale(largest: float, terms: int) -> float:
    """Power of two that turns numbers into integers whose sums an fp64 holds exactly.

    ``round(x * scale)`` is an integer, and any sum of up to ``2 * terms`` of them stays below
    2**53. No addition rounds, so neither the order nor the process or device of the additions
    matters. Rounding to the grid costs at most ``terms * largest * 2**-51`` per term, as much as
    the rounding of an ordinary fp64 sum. The integers are fp64 because ``index_add_`` of int64 is
    three times slower on a CPU.

    Args:
        largest: largest absolute value, finite, >= 0.
        terms: number of terms of the largest sum; 1.0 is returned if there is nothing to sum.

    Example:
        >>> x = torch.rand(1000)
        >>> scale = exact_scale(1.0, 1000)
        >>> grid = on_grid(x, scale)
        >>> bool(grid.sum() == grid.flip(0).cumsum(0)[-1])
        True
    """
    if largest == 0 or terms == 0:
        return 1.0
    exponent = _BITS - math.frexp(largest)[1] - math.frexp(terms)[1]
    return math.ldexp(1.0, max(-1022, min(1023, exponent)))


def on_grid(x: Tensor, scale: float) -> Tensor:
    """Rounds ``x`` to multiples of ``1 / scale``: a copy, integers stored in fp64.

    Example:
        >>> on_grid(torch.tensor([0.3, 1.0]), scale=2.0)
        tensor([1., 2.], dtype=torch.float64)
    """
    return x.double().mul(scale).round_()
