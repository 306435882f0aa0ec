"""A queue of past embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.memory.state import State


class FeatureQueue(State):
    """First-in first-out ring of unit embeddings, written in place.

    Starts as random directions. Takes batches of any size: one that does not fit the rest of the
    ring goes on at its start, of one larger than the ring the last rows stay.

    Attributes:
        value: (K, D) unit rows.
        pointer: row that the next embedding is written to.
        written: embeddings taken since the start, those already overwritten included.
        updates: calls of :meth:`update_` since the start.

    Args:
        size: K, above 0.
        dim: D.
    """

    value: Tensor

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
        """Mean age of the rows that hold embeddings, in updates; those of the last one have 0.

        Exact for batches of equal size, which is taken to be ``written / updates``. A full queue
        of m batches has ``(m - 1) / 2``; 0 where nothing was written.
        """
        if not self.written:
            return 0.0
        batch, held = self.written / self.updates, min(self.written, self.value.shape[0])
        # Whole batches of age 0 to oldest - 1, and what is left of one of age oldest.
        oldest = math.floor(held / batch)
        total = batch * oldest * (oldest - 1) / 2 + (held - oldest * batch) * oldest
        return total / held

    @torch.no_grad()
    def update_(self, keys: Tensor) -> None:
        """Replaces the oldest rows.

        Args:
            keys: (N, D) unit rows, the same on every rank: gather them first.
        """
        for rows, part in self._advance(len(keys)):
            self.value[rows] = keys[part]

    def _advance(self, count: int) -> list[tuple[slice, slice]]:
        """Moves on by a batch; where its parts go, as (rows of the ring, rows of the batch)."""
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

    def set_numbers(self, numbers: list[int]) -> None:
        # Checkpoints from before rows were counted hold the pointer alone.
        self.pointer, self.written, self.updates = numbers if len(numbers) > 1 else (*numbers, 0, 0)
