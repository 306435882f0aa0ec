"""The rows to be clustered, spread over ranks, and sums over them without rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from solo_ext.clustering.feature_file import Features
from solo_ext.core.distributed import gather, rank, rank_barrier, world_size

# Elements of a tile of scores: on a CPU it should fit in the cache, on CUDA it should fill the
# device. Measured on the CPU.
_TILE = {"cpu": 2**19, "cuda": 2**24}
_MOST_ROWS = {"cpu": 2**12, "cuda": 2**15}
_FEWEST_ROWS = 256
_ROW_BLOCK = 64


def tile_rows(width: int, device: torch.device) -> int:
    """Number of rows per tile of ``width`` >= 1 columns: a multiple of 64, at least 256."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    rows = min(_TILE[kind] // width, _MOST_ROWS[kind]) // _ROW_BLOCK * _ROW_BLOCK
    return max(rows, _FEWEST_ROWS)


def tiles(features: Features) -> Iterator[Tensor]:
    """The rows (n, D) in order, in tiles; one empty tile if there are no rows."""
    size = tile_rows(max(1, features.shape[1]), features.device)
    for start in range(0, max(1, len(features)), size):
        yield features[start : start + size]


@dataclass(frozen=True)
class Rows:
    """Rows of this process, and what it knows about all rows.

    Attributes:
        features: (n, D) rows of this process.
        ids: (n,) int64, their numbers among all rows.
        counts: Number of rows of every rank; of this process only if rows are not shared.
        largest: Largest absolute value of all rows, or a bound on it.
        shared: Whether the rows are spread over ranks.
    """

    features: Features
    ids: Tensor
    counts: tuple[int, ...]
    largest: float
    shared: bool

    @property
    def total(self) -> int:
        """Number of rows of all ranks."""
        return sum(self.counts)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation: fp64 for fp64 features, else fp32."""
        return torch.float64 if self.features.dtype == torch.float64 else torch.float32

    def sum(self, x: Tensor) -> Tensor:
        """Sums ``x`` over all ranks, in place."""
        if self.shared:
            rank_barrier(x.device)
            dist.all_reduce(x)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Takes the maximum of ``x`` over all ranks, in place."""
        if self.shared:
            rank_barrier(x.device)
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Copies ``x`` of rank 0 to all ranks, in place."""
        if self.shared:
            rank_barrier(x.device)
            dist.broadcast(x, src=0)
        return x

    def select(self, wanted: Tensor) -> Tensor:
        """Rows by their numbers, on every rank.

        Args:
            wanted: (K,) int64 numbers in [0, total), each at most once.

        Returns:
            (K, D) in the dtype of the computation.
        """
        ascending, order = wanted.to(self.ids.device).sort()
        own, place = self._among(ascending)
        width, device = self.features.shape[1], self.features.device
        found = torch.zeros(len(wanted), width, dtype=self.dtype, device=device)
        found[order[place]] = self.features.index_select(0, own).to(self.dtype)
        # Each row is on one rank and zero on the others, so the sum is that row.
        return self.sum(found)

    def drawn(self, count: int, seed: int) -> Rows:
        """Draws rows without replacement, in their order; the same ones for any spread over ranks.

        Args:
            count: Number of rows, >= 1.
            seed: Of the draw.

        Returns:
            Rows in memory, numbered anew; these rows themselves if there are no more.
        """
        if count >= self.total:
            return self
        lots = torch.randperm(self.total, generator=torch.Generator().manual_seed(seed))
        own, place = self._among(lots[:count].sort().values.to(self.ids.device))
        part = self.features.index_select(0, own)
        return replace(self, features=part, ids=place, counts=_counts(part, self.shared))

    def _among(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this process whose number is in ascending ``numbers``, and their places there."""
        place = torch.searchsorted(numbers, self.ids).clamp_max_(len(numbers) - 1)
        own = (numbers[place] == self.ids).nonzero()[:, 0]
        return own, place.index_select(0, own)

    def collect(self) -> Tensor:
        """All rows in the order of their numbers, on rank 0; the other ranks get no rows.

        Returns:
            (total, D) on rank 0, (0, D) elsewhere.
        """
        features = self.features[:].contiguous()
        if not self.shared:
            return torch.empty_like(features).index_copy_(0, self.ids, features)
        # Allocate memory before the first message, so that a rank that fails here can still tell
        # the others.
        first = rank() == 0
        joined = features.new_empty(self.total if first else 0, features.shape[1])
        rest = max(self.counts[1:]) if first else 0
        all_ids, all_parts = self.ids.new_empty(rest), features.new_empty(rest, features.shape[1])
        rank_barrier(features.device)
        if not first:
            if len(features):
                dist.send(self.ids, dst=0)
                dist.send(features, dst=0)
            return joined
        joined[self.ids] = features
        for source, count in enumerate(self.counts):
            if source and count:
                ids, part = all_ids[:count], all_parts[:count]
                dist.recv(ids, src=source)
                dist.recv(part, src=source)
                joined[ids] = part
        return joined


def rows_of(features: Features, row_ids: Tensor | None, sharded: bool) -> Rows:
    """Checks the rows and exchanges numbers of rows and largest values between ranks.

    Args:
        features: (n, D), floating; n may be 0 on a rank.
        row_ids: (n,) integers; by default rank by rank, in order.
        sharded: Whether every rank holds a share of the rows.

    Returns:
        The rows.

    Raises:
        ValueError: Features that are not 2-D, floating or finite; row numbers that are not 0 to
            N - 1, each once. Raised on all ranks if only the values are wrong.
    """
    if features.ndim != 2 or not features.dtype.is_floating_point:
        raise ValueError(
            f"features have the shape {tuple(features.shape)} and the dtype {features.dtype}; "
            "pass a floating (n, D) matrix"
        )
    shared = sharded and world_size() > 1
    counts = _counts(features, shared)
    first = sum(counts[: rank()]) if shared else 0
    ids = torch.arange(first, first + len(features), device=features.device)
    if row_ids is not None:
        if row_ids.shape != ids.shape or row_ids.is_floating_point():
            raise ValueError(
                f"row_ids have the shape {tuple(row_ids.shape)} and the dtype {row_ids.dtype}; "
                f"pass one integer for each of the {len(features)} rows of features"
            )
        ids = row_ids.to(ids)
    if isinstance(features, Tensor):
        features = features.detach()
    rows = Rows(features, ids, counts, _largest(features, shared), shared)
    if row_ids is not None:
        _check_ids(rows)
    return rows


def _counts(features: Features, shared: bool) -> tuple[int, ...]:
    count = torch.tensor([len(features)], device=features.device)
    if shared:
        rank_barrier(count.device)
        count = gather(count)
    return tuple(count.tolist())


def _largest(features: Features, shared: bool) -> float:
    largest = torch.zeros((), dtype=torch.float64, device=features.device)
    broken = torch.zeros((), dtype=torch.int64, device=features.device)
    for tile in tiles(features) if len(features) else ():
        of_rows = tile.abs().amax(1)
        broken += (~of_rows.isfinite()).sum()
        largest = torch.maximum(largest, of_rows.amax().double())
    # A NaN would make the maximum over ranks a NaN.
    largest = largest.nan_to_num(0.0, posinf=0.0)
    if shared:
        rank_barrier(features.device)
        dist.all_reduce(broken)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if broken:
        raise ValueError(
            f"features: {int(broken)} rows hold NaN or infinity; every value must be finite. A "
            "network that diverges gives such features: lower the learning rate"
        )
    return float(largest)


def _check_ids(rows: Rows) -> None:
    valid = rows.ids[(rows.ids >= 0) & (rows.ids < rows.total)]
    seen = rows.sum(torch.bincount(valid, minlength=rows.total))
    missing, repeated = int((seen == 0).sum()), int((seen > 1).sum())
    # There are as many numbers as rows, so a number out of range leaves another one missing.
    if not missing:
        return
    raise ValueError(
        f"row_ids: of the numbers 0 to {rows.total - 1}, {missing} are missing and {repeated} "
        "occur more than once; number all rows once, over all ranks. A sampler that repeats rows "
        "to fill up the last batch does not"
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
        largest: Largest absolute value, finite, >= 0.
        terms: Number of terms of the largest sum, >= 0.

    Returns:
        The scale; 1.0 if there is nothing to sum.

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
    """Rounds ``x`` to multiples of ``1 / scale``, stored as integers in fp64.

    Args:
        x: Floating tensor of any shape.
        scale: From :func:`exact_scale`.

    Returns:
        fp64 tensor of the same shape, a copy.
    """
    return x.double().mul(scale).round_()
