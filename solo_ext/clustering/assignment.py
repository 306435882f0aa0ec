"""Nearest means and the distances to them, in tiles of bounded memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering.feature_file import Features

# Elements of a tile of scores: on a CPU it should stay in the cache, on CUDA it should fill the
# device; measured on the CPU.
_TILE = {"cpu": 2**19, "cuda": 2**24}
_MOST_ROWS = {"cpu": 2**12, "cuda": 2**15}
_FEWEST_ROWS = 256
_ROW_BLOCK = 64
# Scores that are first looked at together. A maximum without its place is several times faster on a
# CPU than one with it.
_GROUP = 32


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


def assign(features: Features, means: Tensor) -> Tensor:
    """Index of the nearest mean of every row.

    Args:
        features: (n, D), floating.
        means: (K, D), fp32 or fp64; the dtype of the products.

    Returns:
        (n,) int64; of equally near means the first.
    """
    return search(features, means, means.double().mean(0))[1]


def search(
    features: Features, means: Tensor, centre: Tensor, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest score of every row and the mean that has it, which is the nearest.

    ``max_k x . (m_k - c) - |m_k - c|^2 / 2 - c . (m_k - c)`` is at ``argmin_k |x - m_k|^2`` for any
    centre c; one amid the means keeps the rounding of the product in proportion to the spread of
    the means instead of to their distance from the origin.

    Args:
        features: (n, D), floating.
        means: (K, D), fp32 or fp64; the dtype of the products.
        centre: (D,) fp64. Scores with the same one can be compared.
        wanted: (m,) int64 numbers of the rows to look at; by default all.

    Returns:
        The scores (m,) and the means (m,), int64; of equal scores the first.
    """
    n = len(features) if wanted is None else len(wanted)
    centred = means.double() - centre
    bias = -(centred.square().sum(1) / 2 + centred @ centre).to(means.dtype)
    weight = centred.to(means.dtype)
    if features.device.type == "cpu" and len(means) > 2 * _GROUP:
        fill = -len(means) % _GROUP
        weight = F.pad(weight, (0, 0, 0, fill))
        bias = F.pad(bias, (0, fill), value=-torch.inf)
    rows = tile_rows(len(weight), features.device)
    scores = means.new_empty(rows, len(weight))
    best = means.new_empty(n)
    found = torch.empty(n, dtype=torch.int64, device=features.device)
    # The library may sum in another order for another number of rows. All tiles have the same
    # number, so that a row's nearest mean does not depend on how many rows are beside it.
    padded = means.new_zeros(rows, features.shape[1])
    for start in range(0, n, rows):
        own = slice(start, start + rows)
        tile = features[own] if wanted is None else features.index_select(0, wanted[own])
        tile = tile.to(means.dtype)
        count = len(tile)
        if count < rows:
            padded[:count] = tile
            tile = padded
        torch.addmm(bias, tile, weight.T, out=scores)
        value, index = _first_largest(scores)
        best[own], found[own] = value[:count], index[:count]
    return best, found


def _first_largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    width = scores.shape[1]
    if scores.device.type != "cpu" or width <= 2 * _GROUP or width % _GROUP:
        best, found = scores.max(dim=1)
        return best, found
    grouped = scores.view(len(scores), -1, _GROUP)
    best, group = grouped.amax(2).max(dim=1)
    place = group[:, None, None].expand(-1, 1, _GROUP)
    within = grouped.gather(1, place)[:, 0].max(dim=1).indices
    return best, group * _GROUP + within


def distances_to(features: Features, means: Tensor, assignments: Tensor) -> Tensor:
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
