"""Nearest means again and again, while some of the means move."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.clustering.assignment import search
from solo_ext.clustering.feature_file import Features

# Above this share of moved means a search among all is no slower.
_MOST_MOVED = 0.5


class Nearest:
    """Keeps every row's nearest mean up to date.

    A row whose mean stands still is compared with the means that moved only: the others were
    farther away and still are.
    """

    def __init__(self, features: Features) -> None:
        """Knows nothing yet.

        Args:
            features: (n, D), floating.
        """
        self._features = features
        self._means: Tensor | None = None

    def __call__(self, means: Tensor) -> Tensor:
        """Index of the nearest mean of every row.

        Args:
            means: (K, D), fp32 or fp64, K as before.

        Returns:
            (n,) int64; of equally near means the first.
        """
        old, self._means = self._means, means
        if old is not None:
            moved = (means != old).any(1)
            which = moved.nonzero()[:, 0]
            if len(which) <= _MOST_MOVED * len(means):
                self._found = self._updated(means, moved, which)
                return self._found
        self._centre = means.double().mean(0)
        self._best, self._found = search(self._features, means, self._centre)
        return self._found

    def _updated(self, means: Tensor, moved: Tensor, which: Tensor) -> Tensor:
        found = self._found.clone()
        left = moved.index_select(0, found)
        lost, kept = left.nonzero()[:, 0], (~left).nonzero()[:, 0]
        if len(which):
            score, place = search(self._features, means[which], self._centre, kept)
            mean = which[place]
            best, now = self._best[kept], found[kept]
            nearer = (score > best) | ((score == best) & (mean < now))
            self._best[kept] = torch.where(nearer, score, best)
            found[kept] = torch.where(nearer, mean, now)
        self._best[lost], found[lost] = search(self._features, means, self._centre, lost)
        return found
