"""Which few rows keep their labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def labelled_draw(
    labels: npt.NDArray[np.int64],
    classes: Sequence[int] | npt.NDArray[np.int64],
    amount: int | float,
    seed: int,
    draw: int,
) -> Tensor:
    """Draws rows of every class.

    A draw depends on the labels and on (seed, draw) alone, so that models whose features come in
    the same order are compared on the same rows. Of one draw the smaller amounts are contained in
    the larger ones.

    Args:
        labels: (n,), -1 where there is none.
        classes: that must be present.
        amount: rows per class; a float is a share of every class, at least one row.
        seed: at least 0.
        draw: number of the draw.

    Returns:
        Indices of the rows, class by class.

    Raises:
        ValueError: a class has too few rows.
    """
    rng = np.random.default_rng((seed, draw))
    chosen = [np.empty(0, dtype=np.int64)]
    for label in classes:
        own = np.flatnonzero(labels == label)
        wanted = amount if isinstance(amount, int) else max(1, round(amount * len(own)))
        if len(own) < wanted:
            raise ValueError(
                f"Class {label} has {len(own)} train rows, fewer than per_class={wanted}; lower "
                "per_class or pass more rows of it."
            )
        chosen.append(rng.permutation(own)[:wanted])
    return torch.from_numpy(np.concatenate(chosen))
