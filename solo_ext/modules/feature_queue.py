"""A queue of past embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.modules.state import State


class FeatureQueue(State):
    """First-in first-out ring of unit embeddings, written in place.

    Starts as random directions. Takes batches of any size: one that does not fit the rest of the
    ring goes on at its start, of one larger than the ring the last rows stay.

    Attributes:
        value: (K, D) unit rows.
        pointer: row that the next embedding is written to.

    Args:
        size: K, above 0.
        dim: D.
    """

    value: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("value", F.normalize(torch.randn(size, dim), dim=1))
        self.pointer = 0

    @torch.no_grad()
    def update_(self, keys: Tensor) -> None:
        """Replaces the oldest rows.

        Args:
            keys: (N, D) unit rows, the same on every rank: gather them first.
        """
        size = self.value.shape[0]
        skipped = max(len(keys) - size, 0)
        keys, begin = keys[skipped:], (self.pointer + skipped) % size
        until_end = min(size - begin, len(keys))
        self.value[begin : begin + until_end] = keys[:until_end]
        self.value[: len(keys) - until_end] = keys[until_end:]
        self.pointer = (begin + len(keys)) % size

    def numbers(self) -> list[int]:
        return [self.pointer]

    def set_numbers(self, numbers: list[int]) -> None:
        (self.pointer,) = numbers
