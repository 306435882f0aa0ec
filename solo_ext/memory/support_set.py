"""Past embeddings to find nearest neighbours among."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.kernels.nearest_rows import nearest_rows
from solo_ext.memory.feature_queue import FeatureQueue


class Neighbours(NamedTuple):
    """Nearest neighbours of each query, most similar first, without gradient.

    Attributes:
        embeddings: (N, k, D), a copy: the set may be written to before they are used.
        index: (N, k) their rows in the set.
        similarity: (N, k) dot products with the query; minus infinity where fewer than k rows
            were allowed, and the neighbour is then any row.
        labels: (N, k) their labels, -1 where there is none.
    """

    embeddings: Tensor
    index: Tensor  # type: ignore[assignment]  # in place of tuple's method of that name
    similarity: Tensor
    labels: Tensor


class SupportSet(FeatureQueue):
    """Queue of unit embeddings that knows which image each one is of, and its label.

    Attributes:
        indices: (K,) sample indices, -1 where there is none.
        labels: (K,) labels, -1 where there is none.

    Args:
        size: K, above 0.
        dim: D.

    Source:
        Dwibedi et al., ICCV 2021, arXiv 2104.14548.
    """

    indices: Tensor
    labels: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__(size, dim)
        self.register_buffer("indices", torch.full((size,), -1))
        self.register_buffer("labels", torch.full((size,), -1))

    @torch.no_grad()
    def update_(
        self, keys: Tensor, indices: Tensor | None = None, labels: Tensor | None = None
    ) -> None:
        """Replaces the oldest rows.

        Args:
            keys: (N, D) unit rows, the same on every rank, as are the others: gather them first.
            indices: (N,) sample indices, at least 0; by default -1, of no known image.
            labels: (N,) labels; by default -1.

        Raises:
            ValueError: indices or labels are not one per key.
        """
        for name, given in (("indices", indices), ("labels", labels)):
            if given is not None and given.shape != keys.shape[:1]:
                raise ValueError(
                    f"{name} must be ({len(keys)},), one per key, got {tuple(given.shape)}"
                )
        for rows, part in self._advance(len(keys)):
            self.value[rows] = keys[part]
            self.indices[rows] = -1 if indices is None else indices[part]
            self.labels[rows] = -1 if labels is None else labels[part]

    @torch.no_grad()
    def nearest(self, query: Tensor, k: int = 1, ids: Tensor | None = None) -> Neighbours:
        """Finds the rows with the largest dot product with each query, random start included.

        Look up before the queries' own embeddings are written: those would be found.

        Args:
            query: (N, D), unit rows for similarities in [-1, 1].
            k: neighbours to find, in [1, K].
            ids: (N,) sample indices of the queries, at least 0; rows of the same image are left
                out. By default an image may find its own earlier embedding.

        Returns:
            The neighbours.

        Raises:
            ValueError: shapes do not fit, or k is out of range.
        """
        index, similarity = nearest_rows(
            query,
            self.value,
            k,
            query_ids=ids,
            table_ids=None if ids is None else self.indices,
        )
        return Neighbours(self.value[index], index, similarity, self.labels[index])
