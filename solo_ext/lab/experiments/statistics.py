"""Statistics over seeds, and what they say for or against hypotheses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np
from scipy import stats

from solo_ext.lab.experiments.results import Place, Results
from solo_ext.lab.experiments.settings import Hypothesis

LEVEL = 0.95
Answer = Literal["reproduced", "contradicted", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """Mean and sample deviation over seeds, and the mean's 95 % interval; null for one value."""

    mean: float
    deviation: float | None
    low: float | None
    high: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, sample deviation, and ``mean ± t(0.975, n - 1) * deviation / sqrt(n)``.

    >>> found = estimate([2.0, 4.0, 1.0])
    >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
    '2.33 (-1.46 to 6.13)'
    """
    count = len(values)
    if count == 0:
        return None
    mean = statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, None, None, 1)
    deviation = statistics.stdev(values)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * deviation / math.sqrt(count)
    return Estimate(mean, deviation, mean - half, mean + half, count)


def mean_of(results: Results, place: Place, row: str, measure: str) -> Estimate | None:
    """Estimate of a row's score over its seeds."""
    return estimate(list(results.scores(place, row, measure).values()))


def differences(results: Results, place: Place, row: str, base: str, measure: str) -> list[float]:
    """``row - base`` for every seed for which both have the score."""
    above, below = (results.scores(place, name, measure) for name in (row, base))
    return [above[seed] - below[seed] for seed in above if seed in below]


def paired_p_value(values: Sequence[float]) -> float | None:
    """Two-sided p value of the paired t test; null for fewer than two differences.

    Equal differences have p = 1 if they are 0, otherwise p = 0.

    >>> round(paired_p_value([2.0, 4.0, 1.0]), 3)
    0.118
    """
    if len(values) < 2:
        return None
    if len(set(values)) == 1:
        return 1.0 if values[0] == 0 else 0.0
    return float(stats.ttest_1samp(values, 0).pvalue)


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


@dataclass(frozen=True)
class Verdict:
    """Evidence of one data set and budget for or against a hypothesis.

    Attributes:
        pairs: seeds that both rows have.
        estimate: mean and interval of the differences paired by seed; null without pairs.
        p_value: of the paired t test, two-sided; null for fewer than two pairs.
        adjusted: the same, adjusted by Holm's method for all tests of the benchmark.
        reason: why it is undecided, otherwise empty.
    """

    name: str
    hypothesis: Hypothesis
    place: Place
    pairs: int
    estimate: Estimate | None
    p_value: float | None
    adjusted: float | None
    answer: Answer
    reason: str


def verdicts(results: Results) -> list[Verdict]:
    """One verdict per hypothesis, data set and budget with records of both rows."""
    found = []
    for name, claim in results.settings.hypotheses.items():
        for place in results.places():
            if all(results.scores(place, row, claim.measure) for row in (claim.row, claim.base)):
                pairs = differences(results, place, claim.row, claim.base, claim.measure)
                found.append((name, claim, place, pairs, paired_p_value(pairs)))
    adjusted = iter(holm([p for *_, p in found if p is not None]))
    return [
        Verdict(
            name,
            claim,
            place,
            len(pairs),
            estimate(pairs),
            p,
            None if p is None else next(adjusted),
            *_answer(results, name, claim, place, pairs),
        )
        for name, claim, place, pairs, p in found
    ]


def _answer(
    results: Results, name: str, claim: Hypothesis, place: Place, pairs: Sequence[float]
) -> tuple[Answer, str]:
    """``reproduced`` if the whole interval is on the expected side; with a reason if undecided.

    To show that a row is not above another, the interval must end below the margin: finding no
    difference does not show that there is none.
    """
    if unlike := results.unlike(place, claim.row, claim.base):
        return "undecided", f"the rows are not of the same {', '.join(unlike)}"
    if name not in results.written:
        return "undecided", "it was not noted before its runs"
    moment = datetime.fromisoformat(results.written[name])
    known = sum(
        datetime.fromisoformat(record["finished"]) <= moment
        for row in (claim.row, claim.base)
        for record in results.runs(place, row).values()
    )
    if known:
        return "undecided", f"{known} of its runs were known when it was written"
    mean = estimate(pairs)
    if mean is None or mean.low is None or mean.high is None or mean.count < claim.seeds:
        return "undecided", f"{len(pairs)} of {claim.seeds} pairs"
    if claim.direction == "not_above":
        if mean.high <= claim.margin:
            return "reproduced", ""
        return ("contradicted", "") if mean.low > 0 else ("undecided", "the interval is too wide")
    if mean.low <= 0 <= mean.high:
        return "undecided", "the interval holds 0"
    above = mean.low > 0
    return ("reproduced" if above == (claim.direction == "above") else "contradicted"), ""
