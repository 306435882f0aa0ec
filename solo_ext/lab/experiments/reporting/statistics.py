"""Statistics over seeds: intervals, paired differences, ranks, many tests at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# scipy.stats has these too, and takes seconds to import.
from scipy.special import stdtr, stdtrit

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: of the values.
        deviation: of the sample, with n - 1; null for one value.
        half: half the width of the mean's 95 % interval by Student's t; null for one value.
        count: of the values.
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
    """Mean, sample deviation and ``t(0.975, n - 1) * deviation / sqrt(n)``; null without values."""
    count = len(values)
    if count == 0:
        return None
    mean = statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, None, 1)
    deviation = statistics.stdev(values)
    half = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * deviation / math.sqrt(count)
    return Estimate(mean, deviation, half, count)


def paired_differences(row: Mapping[int, float], base: Mapping[int, float]) -> dict[int, float]:
    """``row - base`` for every seed that both have, in the order of the seeds."""
    return {seed: row[seed] - base[seed] for seed in sorted(row.keys() & base.keys())}


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p value of the paired t test; null for fewer than two pairs.

    Differences that are all alike have p = 1 where they are 0, else p = 0.
    """
    found = estimate(differences)
    if found is None or found.deviation is None:
        return None
    if found.deviation == 0:
        return 1.0 if found.mean == 0 else 0.0
    t = found.mean / (found.deviation / math.sqrt(found.count))
    return float(2 * stdtr(found.count - 1, -abs(t)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for being several, by Holm's step-down method, in the given order.

    The i-th smallest of m becomes ``max over j <= i of min(1, (m - j + 1) p_j)``.
    """
    adjusted = [0.0] * len(p_values)
    reached = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = reached
    return adjusted


def common_seeds(scores: Mapping[str, Mapping[int, float]]) -> list[int]:
    """Seeds that every row has that has any."""
    held = [set(by_seed) for by_seed in scores.values() if by_seed]
    return sorted(set.intersection(*held)) if held else []


def mean_ranks(scores: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Rank of every row, 1 for the highest score, averaged over the seeds that all rows have.

    Ties share the mean of their ranks. Rows without a score have no rank, and no row has one where
    the rows share no seed: ranks over different seeds would be among different rows.

    Args:
        scores: by row and seed.
    """
    rows = [row for row, by_seed in scores.items() if by_seed]
    seeds = common_seeds(scores)
    if not seeds:
        return {}

    def rank(row: str, seed: int) -> float:
        own = scores[row][seed]
        above = sum(scores[other][seed] > own for other in rows)
        alike = sum(scores[other][seed] == own for other in rows)
        return above + (alike + 1) / 2

    return {row: statistics.fmean(rank(row, seed) for seed in seeds) for row in rows}
