"""How much of a matrix of similarities to hold at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_BYTES = {"cpu": 2**20, "cuda": 2**25}
"""What stays in a core's own cache, and what keeps a GPU busy."""


def tile_rows(x: Tensor, columns: int, least: int, share: int = 1) -> int:
    """Rows of a tile with ``columns`` columns that suits the device of ``x``.

    Args:
        x: gives device and element size.
        columns: of the tile.
        least: fewer rows are not worth a matrix product.
        share: how many such tiles fill the budget.
    """
    budget = _BYTES.get(x.device.type, _BYTES["cuda"]) * share
    return max(budget // (x.element_size() * max(columns, 1)), least)


def tiles_of(count: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``count`` rows in order, the last as long as what is left."""
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))
