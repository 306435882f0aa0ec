"""Nearest means and the distances to them, in tiles of bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of a tile of scores: on a CPU it should stay in the cache, on CUDA it should fill the
# device; measured on the CPU.
_TILE = {"cpu": 2**19, "cuda": 2**24}
_MOST_ROWS = {"cpu": 2**12, "cuda": 2**15}
_FEWEST_ROWS = 256
_ROW_BLOCK = 64


def tile_rows(width: int, device: torch.device) -> int:
    """Number of rows of a tile of ``width`` columns.

    Args:
        width: Number of columns, >= 1.
        device: Where the tile lives.

    Returns:
        A multiple of 64, at least 256.
    """
    kind = "cpu" if device.type == "cpu" else "cuda"
    rows = min(_TILE[kind] // width, _MOST_ROWS[kind]) // _ROW_BLOCK * _ROW_BLOCK
    return max(rows, _FEWEST_ROWS)


def assign(features: Tensor, means: Tensor) -> Tensor:
    """Index of the nearest mean of every row.

    ``argmax_k x . (m_k - c) - |m_k - c|^2 / 2 - c . (m_k - c)`` with the centre c of the means,
    which is ``argmin_k |x - m_k|^2`` for any c; taking c out keeps the rounding of the product in
    proportion to the spread of the means instead of to their distance from the origin.

    Args:
        features: (n, D), floating.
        means: (K, D), fp32 or fp64; the dtype of the products.

    Returns:
        (n,) int64; of equally near means the first.
    """
    n, k = len(features), len(means)
    centre = means.double().mean(0)
    centred = means.double() - centre
    bias = -(centred.square().sum(1) / 2 + centred @ centre).to(means.dtype)
    weight = centred.to(means.dtype).T
    rows = tile_rows(k, features.device)
    scores = means.new_empty(rows, k)
    best = means.new_empty(rows)
    found = torch.empty(n, dtype=torch.int64, device=features.device)
    nearest = torch.empty(rows, dtype=torch.int64, device=features.device)
    # The library may sum in another order for another number of rows. All tiles have the same
    # number, so that a row's nearest mean does not depend on how many rows are beside it.
    padded = means.new_zeros(rows, features.shape[1])
    for start in range(0, n, rows):
        tile = features[start : start + rows].to(means.dtype)
        count = len(tile)
        if count < rows:
            padded[:count] = tile
            tile = padded
        torch.addmm(bias, tile, weight, out=scores)
        torch.max(scores, dim=1, out=(best, nearest))
        found[start : start + count] = nearest[:count]
    return found


def distances_to(features: Tensor, means: Tensor, assignments: Tensor) -> Tensor:
    """Euclidean distance of every row to the mean it is assigned to.

    ``|x_i - m_{a_i}|``, as the norm of a difference: exactly 0 for a row that is a mean.

    Args:
        features: (n, D), floating.
        means: (K, D), fp32 or fp64.
        assignments: (n,) int64 in [0, K).

    Returns:
        (n,) of the dtype of ``means``, in the unit of the features.
    """
    rows = tile_rows(features.shape[1], features.device)
    found = means.new_empty(len(features))
    for start in range(0, len(features), rows):
        own = slice(start, start + rows)
        difference = features[own].to(means.dtype) - means.index_select(0, assignments[own])
        found[own] = torch.linalg.vector_norm(difference, dim=1)
    return found
