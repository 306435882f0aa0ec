"""Prototypes that learn, and those that a clustering found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.memory.state import State


class Prototypes(nn.Module):
    """Learnable unit directions.

    Rows are brought back to unit length in place after each optimiser step, as SwAV does, and not
    by weight normalisation in the forward pass: the loss then reads the parameter itself, with
    neither a copy of it nor a second gradient of its size, and a row's step is not divided by a
    length that grows from step to step. Starts as random directions.

    Attributes:
        weight: (K, D).

    Args:
        num_prototypes: K, above 0.
        dim: D, above 0.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> prototypes = Prototypes(10, dim=4)
        >>> prototypes(F.normalize(torch.randn(3, 4), dim=1)).shape
        torch.Size([3, 10])
        >>> bool(torch.allclose(prototypes.weight.norm(dim=1), torch.ones(10)))
        True
    """

    def __init__(self, num_prototypes: int, dim: int) -> None:
        super().__init__()
        if num_prototypes < 1 or dim < 1:
            raise ValueError(f"num_prototypes={num_prototypes}, dim={dim}: must be 1 or more")
        self.weight = nn.Parameter(torch.randn(num_prototypes, dim))
        self.normalize_()

    @classmethod
    def from_rows(cls, rows: Tensor) -> Self:
        """Prototypes that start in given directions, a teacher's for example.

        Args:
            rows: (K, D) of any length above 0; copied. Weight norm's ``weight_v`` serves as well
                as the product: the length ``weight_g`` falls away.

        Raises:
            ValueError: the shape is another.
        """
        if rows.ndim != 2:
            raise ValueError(f"rows must be (K, D), got {tuple(rows.shape)}")
        # On the meta device no random start is drawn, which would move the generator.
        with torch.device("meta"):
            made = cls(*rows.shape)
        made.weight = nn.Parameter(rows.detach().clone())
        made.normalize_()
        return made

    @torch.no_grad()
    def normalize_(self) -> None:
        """Brings the rows to unit length in place; to be called after each optimiser step."""
        length = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        self.weight.div_(length.clamp(min=torch.finfo(length.dtype).tiny))

    def forward(self, x: Tensor) -> Tensor:
        """Cosines with the prototypes.

        Args:
            x: (N, D) unit rows.

        Returns:
            (N, K).
        """
        return F.linear(x, self.weight)


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

    Example:
        >>> state = ClusterPrototypes([2, 5, 2], dim=4)
        >>> state.names, [table.shape[0] for table in state.prototypes], state.epoch
        (['2', '5', '2_2'], [2, 5, 2], -1)
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

    def load_extra_state(self, numbers: list[int]) -> None:
        self.epoch, self.backend = numbers[0], bytes(numbers[1:]).decode()
