"""Prototypes from a clustering, as the last E-step left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solo_ext.memory.state import State


class ClusterPrototypes(State):
    """Result of the last E-step at every granularity m.

    Attributes:
        num_prototypes: K of each granularity.
        names: these as text; a repeated K gets a number, such as ``2_2``.
        assignments: (M, n) cluster of every sample, by sample index.
        epoch: epoch of the last E-step, -1 before the first.
        backend: name of the k-means backend that the run uses; empty before it starts.

    Args:
        num_prototypes: K of each granularity, above 0.
        dim: D.

    Example:
        >>> state = ClusterPrototypes([2, 5, 2], dim=4)
        >>> state.names, [table.shape[0] for table in state.prototypes], state.epoch
        (['2', '5', '2_2'], [2, 5, 2], -1)
    """

    assignments: Tensor
    sized_by_data = ("assignments",)

    def __init__(self, num_prototypes: Sequence[int], dim: int) -> None:
        super().__init__()
        self.num_prototypes = sizes = tuple(num_prototypes)
        seen = [sizes[:m].count(size) for m, size in enumerate(sizes)]
        self.names = [f"{k}_{n + 1}" if n else str(k) for k, n in zip(sizes, seen, strict=True)]
        self.epoch, self.backend = -1, ""
        for m, size in enumerate(sizes):
            self.register_buffer(f"means_{m}", torch.zeros(size, dim))
            self.register_buffer(f"prototypes_{m}", torch.zeros(size, dim))
            self.register_buffer(f"concentration_{m}", torch.ones(size))
        none = torch.zeros(len(sizes), 0, dtype=torch.long)
        self.register_buffer("assignments", none)

    @property
    def means(self) -> list[Tensor]:
        """Means of the clusters from k-means, (K, D) each; the next E-step starts from them."""
        return self._all("means")

    @property
    def prototypes(self) -> list[Tensor]:
        """The normalised means, (K, D) each."""
        return self._all("prototypes")

    @property
    def concentration(self) -> list[Tensor]:
        """Concentration of each prototype, (K,) each."""
        return self._all("concentration")

    @torch.no_grad()
    def update_(
        self,
        means: Sequence[Tensor],
        prototypes: Sequence[Tensor],
        concentration: Sequence[Tensor],
        assignments: Tensor,
    ) -> None:
        """Stores the result of an E-step; shapes as in the attributes."""
        held = self.means, self.prototypes, self.concentration
        for tables, values in zip(held, (means, prototypes, concentration), strict=True):
            for table, value in zip(tables, values, strict=True):
                table.copy_(value)
        self.assignments = assignments.to(self.assignments)

    def _all(self, name: str) -> list[Tensor]:
        return [self.get_buffer(f"{name}_{m}") for m in range(len(self.num_prototypes))]

    def extra_state(self) -> list[int]:
        return [self.epoch, *self.backend.encode()]

    def load_extra_state(self, numbers: list[int]) -> None:
        self.epoch, self.backend = numbers[0], bytes(numbers[1:]).decode()
