"""A table with the last embedding of every sample."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.memory.state import State


class FeatureBank(State):
    """Embeddings by sample index, for a clustering without a pass over the data set.

    Attributes:
        value: (n, D), zero where nothing was written.
        filled: (n,) whether a row was written.

    Args:
        dim: D.
    """

    value: Tensor
    filled: Tensor
    sized_by_data = ("value", "filled")

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(0, dim))
        self.register_buffer("filled", torch.zeros(0, dtype=torch.bool))

    def resize_(self, num_samples: int) -> None:
        """Makes room for ``num_samples`` rows, all empty."""
        self.value = self.value.new_zeros(num_samples, self.value.shape[1])
        self.filled = self.filled.new_zeros(num_samples)

    @torch.no_grad()
    def update_(self, indices: Tensor, features: Tensor) -> None:
        """Overwrites the rows of some samples.

        Args:
            indices: (N,) distinct sample indices, the same on every rank: gather them first, or
                the ranks' banks, of which a checkpoint keeps one, drift apart.
            features: (N, D).
        """
        self.value.index_copy_(0, indices, features.to(self.value.dtype))
        self.filled.index_fill_(0, indices, True)
