"""Statistics over seeds: intervals, paired differences, ranks, several tests at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: mean of the values.
        deviation: of the sample, with n - 1; null for one value.
        half: half the width of the mean's 95 % interval by Student's t; null for one value.
        count: number of values.
    """

    mean: float
    deviation: float | None
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half is None else self.mean + self.half


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, sample deviation and ``t(0.975, n - 1) * deviation / sqrt(n)``; null without values.

    >>> found = estimate([2.0, 4.0, 1.0])
    >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
    '2.33 (-1.46 to 6.13)'
    """
    count = len(values)
    if count == 0:
        return None
    mean = statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, None, 1)
    deviation = statistics.stdev(values)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * deviation / math.sqrt(count)
    return Estimate(mean, deviation, half, count)


def paired_differences(row: Mapping[int, float], base: Mapping[int, float]) -> dict[int, float]:
    """``row - base`` for every seed that both have, in ascending order of seeds.

    >>> paired_differences({1: 5.0, 2: 7.0}, {2: 6.0, 3: 1.0})
    {2: 1.0}
    """
    return {seed: row[seed] - base[seed] for seed in sorted(row.keys() & base.keys())}


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p value of the paired t test; null for fewer than two pairs.

    Equal differences have p = 1 if they are 0, otherwise p = 0.

    >>> round(paired_p_value([2.0, 4.0, 1.0]), 3)
    0.118
    """
    if len(differences) < 2:
        return None
    if len(set(differences)) == 1:
        return 1.0 if differences[0] == 0 else 0.0
    return float(stats.ttest_1samp(differences, 0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for multiple tests by Holm's step-down method, in the given order.

    The i-th smallest of m becomes ``max over j <= i of min(1, (m - j + 1) p_j)``.

    >>> [round(p, 2) for p in holm([0.03, 0.01, 0.9, 0.02])]
    [0.06, 0.04, 0.9, 0.06]
    """
    given = np.asarray(p_values, dtype=float)
    order = given.argsort(kind="stable")
    adjusted = np.empty_like(given)
    stepped = np.minimum(1, given[order] * np.arange(len(given), 0, -1))
    adjusted[order] = np.maximum.accumulate(stepped)
    return [float(p) for p in adjusted]


def common_seeds(scores: Mapping[str, Mapping[int, float]]) -> list[int]:
    """Seeds that are common to all rows with any score."""
    held = [set(by_seed) for by_seed in scores.values() if by_seed]
    return sorted(set.intersection(*held)) if held else []


def mean_ranks(scores: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Rank of every row, 1 for the highest score, averaged over the seeds that all rows have.

    Ties share the mean of their ranks. Rows without a score have no rank. If the rows share no
    seed, none has a rank, because ranks of different seeds would compare different rows.

    Args:
        scores: by row and seed.

    >>> mean_ranks({"a": {1: 50.0, 2: 51.0}, "b": {1: 48.0, 2: 51.0}})
    {'a': 1.25, 'b': 1.75}
    """
    rows, seeds = [row for row, by_seed in scores.items() if by_seed], common_seeds(scores)
    if not seeds:
        return {}
    values = np.array([[scores[row][seed] for seed in seeds] for row in rows])
    ranks = stats.rankdata(-values, axis=0).mean(axis=1)
    return dict(zip(rows, map(float, ranks), strict=True))
