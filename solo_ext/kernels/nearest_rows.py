"""Nearest rows of a large constant table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.core.precision import full_precision_products
from solo_ext.kernels import dispatch
from solo_ext.kernels.dispatch import tile_rows, tiles_of


class NearestRows(NamedTuple):
    """Result of :func:`nearest_rows`, most similar first.

    Attributes:
        index: (N, k) rows of the table.
        similarity: (N, k) dot products with the query, fp32 (fp64 for fp64 queries); minus
            infinity, with an arbitrary index, if ids leave fewer than k rows.

    Example:
        >>> found = nearest_rows(torch.eye(2, 3), torch.eye(3), k=1)
        >>> found.index.shape, found.similarity.flatten()
        (torch.Size([2, 1]), tensor([1., 1.]))
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
    exact: bool = True,
) -> NearestRows:
    """Finds the rows of a table with the largest dot product with each query.

    ``argmax_j q_i . t_j`` over the rows whose id differs from the query's; the first row among
    equally similar ones. The table is read once; except in the plain form, memory does not grow
    with K. The rows are the nearest in fp32, also under autocast, unless ``exact`` is false. There
    is no gradient.

    Args:
        query: (N, D); pass all views of a batch in one call, which reads the table once.
        table: (K, D); unit rows give neighbours by cosine.
        k: number of rows to find, in [1, K]; each one beyond the first reads every tile once more.
        query_ids: (N,) integers; rows with the query's id, such as earlier embeddings of the same
            image, are not its neighbours.
        table_ids: (K,) ids of the rows; only together with ``query_ids``.
        exact: if false, the factors of the products are rounded to bfloat16, which a GPU multiplies
            faster. The row that is found for a unit query among unit rows may be up to 0.012 less
            similar than the nearest.

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
    query = query.to(dtype if exact else torch.bfloat16)

    def tiles(query: Tensor, rows: int) -> NearestRows:
        return _by_tiles(query, table, k, query_ids, table_ids, rows)

    forms: dict[dispatch.Form, Callable[[Tensor], NearestRows]] = {
        "plain": partial(tiles, rows=len(table)),
        "tiles": partial(tiles, rows=tile_rows(query, len(query), 64)),
    }
    if exact and k == 1 and dispatch.has_fused(query):
        from solo_ext.kernels.fused_nearest import fused_nearest

        forms["fused"] = lambda query: NearestRows(
            *fused_nearest(query, table, query_ids, table_ids)
        )
    with full_precision_products(query.device):
        details = k, query_ids is None, table.dtype
        found = dispatch.run("nearest_rows", forms, [query], len(table), *details)
    return found._replace(similarity=found.similarity.to(dtype))


def _by_tiles(
    query: Tensor,
    table: Tensor,
    k: int,
    query_ids: Tensor | None,
    table_ids: Tensor | None,
    rows: int,
) -> NearestRows:
    # Indices and similarities of the best rows so far, in parts whose columns are best first.
    index: list[Tensor] = []
    best: list[Tensor] = []
    for part in tiles_of(len(table), rows):
        similarity = query @ table[part].to(query.dtype).T
        if query_ids is not None and table_ids is not None:
            same = query_ids.unsqueeze(1) == table_ids[part]
            similarity.masked_fill_(same, float("-inf"))
        # max() returns the first of equal values, topk() any of them.
        for found in range(k):
            value, place = similarity.max(1, keepdim=True)
            index.append(place + part.start if part.start else place)
            best.append(value)
            if found < k - 1:
                similarity.scatter_(1, place, float("-inf"))
        if len(best) == 1:
            continue
        # A stable sort prefers earlier rows among equals.
        values, order = torch.cat(best, 1).sort(dim=1, descending=True, stable=True)
        places = torch.cat(index, 1).gather(1, order[:, :k])
        index, best = [places], [values[:, :k]]
    return NearestRows(index[0], best[0])
