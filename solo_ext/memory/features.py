"""Past embeddings: a queue, a support set for nearest neighbours, a bank by sample index."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.memory.state import State


class FeatureQueue(State):
    """First-in first-out ring buffer of unit embeddings, written in place.

    It starts with random unit rows. Batches may have any size; of a batch larger than the ring,
    only the last rows are kept.

    Attributes:
        value: (K, D) unit rows.
        pointer: row that the next embedding is written to.
        written: number of embeddings written since the start, overwritten ones included.
        updates: calls of :meth:`update_` since the start.

    Args:
        size: K, above 0.
        dim: D.

    Example:
        >>> queue = FeatureQueue(4, dim=2)
        >>> queue.update_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> queue.value.shape, queue.pointer, queue.filled
        (torch.Size([4, 2]), 3, 0.75)
    """

    value: Tensor
    _tables: ClassVar[tuple[str, ...]] = ("value",)

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("value", F.normalize(torch.randn(size, dim), dim=1))
        self.pointer = self.written = self.updates = 0

    @property
    def filled(self) -> float:
        """Share of the rows, in [0, 1], that hold embeddings rather than the random start."""
        return min(self.written / self.value.shape[0], 1.0)

    @property
    def age(self) -> float:
        """Mean age, in updates, of the rows that hold embeddings; the newest have age 0.

        This assumes batches of equal size: the mean age of a full queue of m batches is
        ``(m - 1) / 2``; that of an empty queue is 0.
        """
        if not self.written:
            return 0.0
        batch, held = self.written / self.updates, min(self.written, self.value.shape[0])
        # Whole batches have ages 0 to oldest - 1; a partly overwritten batch has age `oldest`.
        oldest = math.floor(held / batch)
        total = batch * oldest * (oldest - 1) / 2 + (held - oldest * batch) * oldest
        return total / held

    @torch.no_grad()
    def update_(self, keys: Tensor, *notes: Tensor) -> None:
        """Replaces the oldest rows by those of a batch, which must be the same on every rank.

        Args:
            keys: (N, D) unit rows.
            notes: (N,) sample indices and (N,) labels, for a :class:`SupportSet` only.
        """
        for rows, part in self._advance(len(keys)):
            for name, given in zip(self._tables, (keys, *notes), strict=True):
                getattr(self, name)[rows] = given[part]

    def _advance(self, count: int) -> list[tuple[slice, slice]]:
        """Moves the pointer by a batch; returns slices (of the ring, of the batch) to copy."""
        size = self.value.shape[0]
        skipped = max(count - size, 0)
        begin, kept = (self.pointer + skipped) % size, count - skipped
        until_end = min(size - begin, kept)
        self.pointer = (begin + kept) % size
        self.written += count
        self.updates += 1
        first = slice(begin, begin + until_end), slice(skipped, skipped + until_end)
        rest = slice(kept - until_end), slice(skipped + until_end, count)
        return [first, rest]

    def extra_state(self) -> list[int]:
        return [self.pointer, self.written, self.updates]

    def load_extra_state(self, numbers: list[int]) -> None:
        self.pointer, self.written, self.updates = numbers


class SupportSet(FeatureQueue):
    """Queue of unit embeddings that also stores the sample index and the label of each.

    Attributes:
        indices: (K,) sample indices, -1 for none.
        labels: (K,) labels, -1 for none.

    Args:
        size: K, above 0.
        dim: D.

    Example:
        >>> support = SupportSet(8, dim=2)
        >>> support.update_(torch.eye(2), torch.tensor([5, 9]), torch.tensor([0, 1]))
        >>> support.value[:2], support.indices[:3]
        (tensor([[1., 0.],
                [0., 1.]]), tensor([ 5,  9, -1]))

    Source:
        Dwibedi et al., ICCV 2021, arXiv 2104.14548.
    """

    indices: Tensor
    labels: Tensor
    _tables = ("value", "indices", "labels")

    def __init__(self, size: int, dim: int) -> None:
        super().__init__(size, dim)
        self.register_buffer("indices", torch.full((size,), -1))
        self.register_buffer("labels", torch.full((size,), -1))


class FeatureBank(State):
    """Embeddings by sample index, so that clustering needs no pass over the data set.

    Each rank holds its share of the samples.

    Attributes:
        value: (n, D), zero for rows not yet written.
        filled: (n,) whether a row was written.

    Args:
        dim: D.

    Example:
        >>> bank = FeatureBank(dim=2)
        >>> bank.resize_(3)
        >>> bank.update_(torch.tensor([2, 0]), torch.eye(2))
        >>> bank.filled
        tensor([ True, False,  True])
    """

    value: Tensor
    filled: Tensor
    by_sample = {"value": 0, "filled": 0}

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(0, dim))
        self.register_buffer("filled", torch.zeros(0, dtype=torch.bool))

    def resize_(self, num_samples: int) -> None:
        """Allocates empty rows for this rank's share of a data set of ``num_samples``."""
        rows = len(range(distributed.rank(), num_samples, distributed.world_size()))
        self.value = self.value.new_zeros(rows, self.value.shape[1])
        self.filled = self.filled.new_zeros(rows)

    @torch.no_grad()
    def update_(self, indices: Tensor, features: Tensor) -> None:
        """Overwrites the rows of distinct samples (N,) by features (N, D), gathered from all ranks.

        Each rank stores the features of its own samples.
        """
        own, rows = distributed.own_rows(indices)
        # Selecting this rank's samples would wait for the device, because their number is unknown.
        # Instead, the last of them is written again in place of each sample of another rank, or,
        # if this rank has none, a row gets its old value.
        order = torch.arange(len(own), device=own.device)
        again = torch.where(own, order, (order * own).amax())
        own, rows, features = own[again], rows[again], features[again].to(self.value.dtype)
        features = torch.where(own.unsqueeze(1), features, self.value[rows])
        self.value.index_copy_(0, rows, features)
        self.filled.index_copy_(0, rows, own | self.filled[rows])
