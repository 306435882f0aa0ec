"""Clusters in two, and what that gains."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solo_ext.clustering.assignment import tile_rows
from solo_ext.clustering.exact import on_grid
from solo_ext.clustering.rows import Rows

# The first halves are drawn; two steps from there find nearly what many find.
_STEPS = 2


class Halves(NamedTuple):
    """One of the two halves of clusters.

    Attributes:
        sums: (M, D) fp64 sums of its rows, on the grid.
        sizes: (M,) int64 numbers of its rows.
        gains: (M,) fp64, decrease of the sum of squares if the halves have a mean each.
    """

    sums: Tensor
    sizes: Tensor
    gains: Tensor


def halves(
    rows: Rows,
    assignments: Tensor,
    chosen: Tensor,
    sums: Tensor,
    sizes: Tensor,
    scale: float,
    draw: int = 0,
) -> Halves:
    """Splits clusters by 2-means of their own rows.

    The first halves are drawn by the numbers of the rows, so that the difference of their means
    points where the cluster is wide. Every row is compared with the two halves of its own cluster.
    Sums are exact, and so the result does not depend on which rank holds which row.

    Args:
        rows: The rows.
        assignments: (n,) cluster of every row.
        chosen: (M,) int64 clusters to split, each once.
        sums: (K, D) fp64 sums of the clusters, on the grid.
        sizes: (K,) int64.
        scale: Of the grid, see :func:`solo_ext.clustering.exact.exact_scale`.
        draw: Another one begins with other halves.

    Returns:
        One half of each; the rest of the cluster is the other one.
    """
    place = torch.full_like(sizes, -1)
    place[chosen] = torch.arange(len(chosen), device=chosen.device)
    place = place.index_select(0, assignments)
    members = (place >= 0).nonzero()[:, 0]
    place = place.index_select(0, members)
    whole, count = sums[chosen], sizes[chosen]
    direction = limit = None
    for _ in range(1 + _STEPS):
        sums, sizes = torch.zeros_like(whole), torch.zeros_like(count)
        width = tile_rows(whole.shape[1], whole.device)
        for own, at in zip(torch.split(members, width), torch.split(place, width), strict=True):
            if direction is None or limit is None:
                first = _drawn(rows.ids.index_select(0, own), draw)
            else:
                x = rows.features.index_select(0, own).to(rows.dtype)
                first = (x * direction.index_select(0, at)).sum(1) > limit.index_select(0, at)
            own, at = own[first], at[first]
            sums.index_add_(0, at, on_grid(rows.features.index_select(0, own), scale))
            sizes.index_add_(0, at, torch.ones_like(at))
        rows.sum(sums)
        rows.sum(sizes)
        one = sums / sizes.clamp_min(1)[:, None] / scale
        other = (whole - sums) / (count - sizes).clamp_min(1)[:, None] / scale
        apart = one - other
        direction = apart.to(rows.dtype)
        limit = ((one + other) / 2 * apart).sum(1).to(rows.dtype)
    weight = sizes.double() * (count - sizes) / count.clamp_min(1)
    return Halves(sums, sizes, weight * apart.square().sum(1))


def _drawn(ids: Tensor, draw: int) -> Tensor:
    # A hash rather than the parity: rows may be numbered class by class in turn.
    mixed = (ids + 1) * (0x9E3779B1 + 2 * draw * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return (mixed >> 16) & 1 > 0
