"""Nearest rows of a large constant table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.core.precision import full_precision_products
from solo_ext.kernels.tables import tile_rows, tiles_of


class NearestRows(NamedTuple):
    """Result of :func:`nearest_rows`, most similar first.

    Attributes:
        index: (N, k) rows of the table.
        similarity: (N, k) dot products with the query, fp32 (fp64 for fp64 queries); minus
            infinity if too few rows were allowed; the index is then that of any row.
    """

    index: Tensor  # type: ignore[assignment]  # in place of tuple's method of that name
    similarity: Tensor


@torch.no_grad()
def nearest_rows(
    query: Tensor,
    table: Tensor,
    k: int = 1,
    *,
    query_ids: Tensor | None = None,
    table_ids: Tensor | None = None,
    tile: int | None = None,
) -> NearestRows:
    """Finds the rows of a table with the largest dot product with each query.

    ``argmax_j q_i . t_j`` over the rows whose id differs from the query's; among equally similar
    rows the first. The table is read once, tile by tile, so memory does not grow with K. Products
    are computed in fp32 also under autocast. There is no gradient.

    Args:
        query: (N, D); look up the views of a batch in one call, which reads the table once.
        table: (K, D), unit rows for the neighbours by cosine.
        k: number of rows to find, in [1, K]; each one beyond the first reads every tile once more.
        query_ids: (N,) whole numbers; rows with the query's id, such as earlier embeddings of the
            same image, are not its neighbours.
        table_ids: (K,) ids of the rows; only together with ``query_ids``.
        tile: rows of the table per tile; by default what suits the device's cache.

    Returns:
        The rows and their similarities.

    Raises:
        ValueError: shapes do not fit, k is out of range, or only one side has ids.

    Example:
        >>> table = torch.eye(3)
        >>> found = nearest_rows(torch.tensor([[0.1, 0.9, 0.2]]), table, k=2)
        >>> found.index
        tensor([[1, 2]])
        >>> found.similarity
        tensor([[0.9000, 0.2000]])
    """
    if query.ndim != 2 or table.ndim != 2 or query.shape[1] != table.shape[1]:
        shapes = f"{tuple(query.shape)} and {tuple(table.shape)}"
        raise ValueError(f"query must be (N, D) and table (K, D), got {shapes}")
    if not 1 <= k <= len(table):
        raise ValueError(f"k={k}: must lie in [1, {len(table)}], the rows of the table")
    if (query_ids is None) != (table_ids is None):
        raise ValueError("query_ids and table_ids: give both, or neither")
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query = query.to(dtype)
    # Best first: (N, 1) rows of the table, and their similarities.
    index: list[Tensor] = []
    best: list[Tensor] = []
    with full_precision_products(query.device):
        for part in tiles_of(len(table), tile or tile_rows(query, len(query), 64)):
            similarity = query @ table[part].to(dtype).T
            if query_ids is not None and table_ids is not None:
                same = query_ids.unsqueeze(1) == table_ids[part]
                similarity.masked_fill_(same, float("-inf"))
            # max() returns the first of equal values, topk() any of them.
            for _ in range(k):
                value, place = similarity.max(1, keepdim=True)
                index.append(place + part.start)
                best.append(value)
                similarity.scatter_(1, place, float("-inf"))
            # A stable sort prefers earlier rows among equals.
            values, order = torch.cat(best, 1).sort(dim=1, descending=True, stable=True)
            places = torch.cat(index, 1).gather(1, order[:, :k])
            index, best = [places], [values[:, :k]]
    return NearestRows(index[0], best[0])
