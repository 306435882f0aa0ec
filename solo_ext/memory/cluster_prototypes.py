"""The prototypes of a clustering, and which sample belongs to which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solo_ext.memory.state import State


class ClusterPrototypes(State):
    """Result of the last E-step, at every granularity m.

    Attributes:
        num_prototypes: K of each granularity.
        assignments: (M, n) cluster of every sample, by sample index.
        epoch: epoch of the last E-step, -1 before the first.
        backend: name of the k-means backend that the run uses, empty before it starts.

    Args:
        num_prototypes: K of each granularity, above 0.
        dim: D.
    """

    assignments: Tensor
    sized_by_data = ("assignments",)

    def __init__(self, num_prototypes: Sequence[int], dim: int) -> None:
        super().__init__()
        self.num_prototypes = tuple(num_prototypes)
        self.epoch, self.backend = -1, ""
        for m, size in enumerate(self.num_prototypes):
            self.register_buffer(f"means_{m}", torch.zeros(size, dim))
            self.register_buffer(f"prototypes_{m}", torch.zeros(size, dim))
            self.register_buffer(f"concentration_{m}", torch.ones(size))
        none = torch.zeros(len(self.num_prototypes), 0, dtype=torch.long)
        self.register_buffer("assignments", none)

    @property
    def names(self) -> list[str]:
        """K of each granularity, numbered on where the same K comes again."""
        sizes = self.num_prototypes
        seen = [sizes[:m].count(size) for m, size in enumerate(sizes)]
        return [f"{k}_{n + 1}" if n else str(k) for k, n in zip(sizes, seen, strict=True)]

    @property
    def means(self) -> list[Tensor]:
        """Means of the clusters as k-means left them, (K, D) each; where the next one starts."""
        return self._all("means")

    @property
    def prototypes(self) -> list[Tensor]:
        """The means, normalised, (K, D) each."""
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
        """Takes the result of an E-step; shapes as the attributes."""
        for name, values in (
            ("means", means),
            ("prototypes", prototypes),
            ("concentration", concentration),
        ):
            for held, value in zip(self._all(name), values, strict=True):
                held.copy_(value)
        self.assignments = assignments.to(self.assignments)

    def _all(self, name: str) -> list[Tensor]:
        return [self.get_buffer(f"{name}_{m}") for m in range(len(self.num_prototypes))]

    def extra_state(self) -> list[int]:
        return [self.epoch, *self.backend.encode()]

    def set_numbers(self, numbers: list[int]) -> None:
        self.epoch, self.backend = numbers[0], bytes(numbers[1:]).decode()
