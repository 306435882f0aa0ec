"""Statistics over seeds, against scipy and loops by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from solo_ext.lab.experiments.statistics import (
    Estimate,
    common_seeds,
    estimate,
    holm,
    mean_ranks,
    paired_differences,
    paired_p_value,
)

VALUES = [47.9, 44.1, 46.3, 49.2, 45.0]
OTHERS = [46.0, 44.8, 44.1, 47.0, 44.2]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_interval_is_scipys(count: int) -> None:
    values = VALUES[:count]
    found = estimate(values)
    assert found is not None
    assert found.half is not None
    assert found.count == count
    assert found.mean == pytest.approx(sum(values) / count)
    by_hand = math.sqrt(sum((v - sum(values) / count) ** 2 for v in values) / (count - 1))
    assert found.deviation == pytest.approx(by_hand)
    low, high = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_one_value_has_no_interval_and_none_has_nothing() -> None:
    assert estimate([3.5]) == Estimate(3.5, None, None, 1)
    assert estimate([3.5]).low is None  # type: ignore[union-attr]
    assert estimate([]) is None


def test_differences_are_of_the_seeds_that_both_have() -> None:
    row, base = {3: 5.0, 1: 2.0, 7: 9.0}, {1: 1.5, 2: 8.0, 3: 7.0}
    assert paired_differences(row, base) == {1: 0.5, 3: -2.0}
    assert list(paired_differences(row, base)) == [1, 3]
    assert paired_differences(row, {}) == {}


def test_p_value_is_scipys() -> None:
    differences = [a - b for a, b in zip(VALUES, OTHERS, strict=True)]
    assert paired_p_value(differences) == pytest.approx(stats.ttest_rel(VALUES, OTHERS).pvalue)
    # Without the pairs it is another number.
    assert paired_p_value(differences) != pytest.approx(stats.ttest_ind(VALUES, OTHERS).pvalue)


@pytest.mark.parametrize(
    ("differences", "p"), [([], None), ([1.0], None), ([0.0, 0.0], 1.0), ([2.0, 2.0, 2.0], 0.0)]
)
def test_p_value_at_the_edges(differences: list[float], p: float | None) -> None:
    assert paired_p_value(differences) == p


def test_holm_by_hand() -> None:
    # 0.01 x 4; 0.02 x 3; 0.03 x 2 = 0.06 and as much as before it; 0.9.
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_holm_rejects_what_stepping_down_rejects() -> None:
    draw = random.Random(0)
    for _ in range(50):
        p_values = [draw.random() ** 3 for _ in range(6)]
        rejected = set()
        for place, index in enumerate(sorted(range(6), key=lambda i: p_values[i])):
            if p_values[index] > 0.05 / (6 - place):
                break
            rejected.add(index)
        assert {i for i, p in enumerate(holm(p_values)) if p <= 0.05} == rejected


def test_ranks_are_over_the_seeds_that_all_rows_have() -> None:
    scores = {
        "a": {1: 10.0, 2: 20.0, 3: 1.0},
        "b": {1: 30.0, 2: 20.0, 3: 2.0},
        "c": {1: 20.0, 2: 5.0},
        "never": {},
    }
    assert common_seeds(scores) == [1, 2]
    # Seed 1: b, c, a. Seed 2: a and b share 1.5, c.
    assert mean_ranks(scores) == {"a": 2.25, "b": 1.25, "c": 2.5}


def test_ranks_are_scipys() -> None:
    draw = random.Random(1)
    scores = {row: {seed: float(draw.randint(0, 5)) for seed in (1, 2, 3)} for row in "abcdefg"}
    ranks = [stats.rankdata([-by_seed[seed] for by_seed in scores.values()]) for seed in (1, 2, 3)]
    assert list(mean_ranks(scores).values()) == pytest.approx(list(np.mean(ranks, axis=0)))


def test_no_ranks_without_a_common_seed() -> None:
    assert mean_ranks({"a": {1: 1.0}, "b": {2: 1.0}}) == {}
    assert mean_ranks({}) == {}
    assert mean_ranks({"a": {1: 1.0}}) == {"a": 1.0}
