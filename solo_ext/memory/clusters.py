"""Prototypes, concentrations and assignments of the last E-step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.memory.state import State


class ClusterPrototypes(State):
    """Result of the last E-step at every granularity m.

    Attributes:
        num_prototypes: K of each granularity.
        names: ``num_prototypes`` as text; a repeated K gets a number, such as ``2_2``.
        assignments: (M, n) cluster of every sample, by sample index, int32; this rank's share.
        epoch: epoch of the last E-step, -1 before the first.

    Args:
        num_prototypes: K of each granularity, above 0.
        dim: D.

    Example:
        >>> state = ClusterPrototypes([2, 5, 2], dim=4)
        >>> state.names, [table.shape[0] for table in state.prototypes], state.epoch
        (['2', '5', '2_2'], [2, 5, 2], -1)
    """

    assignments: Tensor
    by_sample = {"assignments": 1}

    def __init__(self, num_prototypes: Sequence[int], dim: int) -> None:
        super().__init__()
        self.num_prototypes = sizes = tuple(num_prototypes)
        seen = [sizes[:m].count(size) for m, size in enumerate(sizes)]
        self.names = [f"{k}_{n + 1}" if n else str(k) for k, n in zip(sizes, seen, strict=True)]
        self.epoch = -1
        self._scaled: list[Tensor] = []
        for m, size in enumerate(sizes):
            self.register_buffer(f"means_{m}", torch.zeros(size, dim))
            self.register_buffer(f"prototypes_{m}", torch.zeros(size, dim))
            self.register_buffer(f"concentration_{m}", torch.ones(size))
        none = torch.zeros(len(sizes), 0, dtype=torch.int32)
        self.register_buffer("assignments", none)

    def assignments_of(self, indices: Tensor) -> Tensor:
        """Clusters (M, N) of samples (N,), int64; all ranks must call this with the same N."""
        if distributed.world_size() == 1:
            return self.assignments[:, indices].long()
        own, rows = distributed.own_rows(distributed.gather(indices))
        # Each sample belongs to one rank; the other ranks add 0.
        found = distributed.sum_over_ranks(self.assignments[:, rows] * own)
        return found.chunk(distributed.world_size(), dim=1)[distributed.rank()].long()

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
    def scaled(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Prototypes divided by their concentrations, (K, D) each; cached until the next E-step.

        ``dtype`` is by default that of the prototypes, and fp32 for prototypes in half precision.
        """
        held = self.prototypes[0]
        exact = torch.promote_types(held.dtype, torch.float32)
        wanted = held.device, dtype or exact
        if [(x.device, x.dtype) for x in self._scaled[:1]] != [wanted]:
            pairs = zip(self.prototypes, self.concentration, strict=True)
            self._scaled = [
                (c.to(exact) * (1 / phi.to(exact)).unsqueeze(1)).to(wanted[1]) for c, phi in pairs
            ]
        return self._scaled

    @torch.no_grad()
    def update_(
        self,
        epoch: int,
        means: Sequence[Tensor],
        concentration: Sequence[Tensor],
        assignments: Sequence[Tensor],
    ) -> None:
        """Stores the result of the E-step before an epoch, one item per granularity.

        Assignments (n,) are this rank's share.
        """
        unit = [F.normalize(table, dim=1) for table in means]
        held = *self.means, *self.prototypes, *self.concentration
        for table, value in zip(held, (*means, *unit, *concentration), strict=True):
            table.copy_(value)
        # Store a new tensor, so that a caller can still compare the old assignments with it.
        self.assignments = torch.stack(list(assignments)).to(self.assignments)
        self.epoch, self._scaled = epoch, []

    def _all(self, name: str) -> list[Tensor]:
        return [self.get_buffer(f"{name}_{m}") for m in range(len(self.num_prototypes))]

    def extra_state(self) -> list[int]:
        return [self.epoch]

    def load_extra_state(self, numbers: list[int]) -> None:
        self.epoch = numbers[0]

    def _load_from_state_dict(self, *given: Any) -> None:
        self._scaled = []
        super()._load_from_state_dict(*given)
