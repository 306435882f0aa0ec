"""A teacher's outputs by sample index, for views that are the same in every epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.core.distributed import gather
from solo_ext.memory.state import Unsynchronised


class TeacherCache(Unsynchronised):
    """Table of embeddings; not in checkpoints, for the teacher can fill it again.

    Attributes:
        value: (n, D) in fp32.
        filled: (n,) whether a row was written.

    Args:
        dim: D.
    """

    value: Tensor
    filled: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(0, dim), persistent=False)
        self.register_buffer("filled", torch.zeros(0, dtype=torch.bool), persistent=False)

    def resize_(self, num_samples: int) -> None:
        """Makes room for ``num_samples`` rows, all empty."""
        self.value = self.value.new_zeros(num_samples, self.value.shape[1])
        self.filled = self.filled.new_zeros(num_samples)

    @property
    def complete(self) -> bool:
        """Whether every row was written; waits for the device, so ask between epochs."""
        return len(self.filled) > 0 and bool(self.filled.all())

    @torch.no_grad()
    def update_(self, indices: Tensor, z: Tensor) -> None:
        """Writes the rows of this batch, those of every process.

        Args:
            indices: (N,) sample indices, as many on every process.
            z: (N, D).
        """
        indices, z = gather(indices), gather(z.detach().to(self.value.dtype))
        self.value.index_copy_(0, indices, z)
        self.filled.index_fill_(0, indices, True)

    def get(self, indices: Tensor) -> Tensor:
        """Rows of some samples.

        Args:
            indices: (N,) sample indices.

        Returns:
            (N, D); zero where nothing was written.
        """
        return self.value.index_select(0, indices)
