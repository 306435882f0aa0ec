"""Intervals over seeds, and what they say for or against hypotheses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from scipy import stats

from solo_ext.lab.experiments.results import Place, Results, not_isolated
from solo_ext.lab.experiments.settings import Hypothesis

LEVEL = 0.95
Answer = Literal["reproduced", "equivalent", "contradicted", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """Mean and sample deviation over seeds, and the mean's 95 % interval; null for one value.

    >>> estimate([2.0]), estimate([2.0, 4.0]).count
    (Estimate(mean=2.0, deviation=None, low=None, high=None, count=1), 2)
    """

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
    """Estimate of a row's score over its seeds.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0]})
    >>> mean_of(results, results.places()[0], "pcl", "knn").mean
    91.5
    """
    return estimate(list(results.scores(place, row, measure).values()))


def differences(results: Results, place: Place, row: str, base: str, measure: str) -> list[float]:
    """``row - base`` for every seed for which both have the score.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})
    >>> differences(results, results.places()[0], "pcl", "simclr", "knn")
    [1.0, 1.5]
    """
    above, below = (results.scores(place, name, measure) for name in (row, base))
    return [above[seed] - below[seed] for seed in above if seed in below]


@dataclass(frozen=True)
class Verdict:
    """Evidence of one data set and budget for or against a hypothesis.

    Attributes:
        estimate: mean and interval of the differences paired by seed; null without pairs.
        reason: why it is undecided, otherwise empty.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> (found,) = verdicts(example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]}))
    >>> found.name, found.estimate.mean, found.reason
    ('better', 1.25, 'the interval is too wide')
    """

    name: str
    hypothesis: Hypothesis
    place: Place
    estimate: Estimate | None
    answer: Answer
    reason: str


def verdicts(results: Results) -> list[Verdict]:
    """One verdict per hypothesis, data set and budget with records of both rows.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> scores = {"pcl": [91.0, 92.0, 91.5], "simclr": [90.0, 90.5, 90.1]}
    >>> [verdict.answer for verdict in verdicts(example_results(scores))]
    ['reproduced']
    """
    return [
        _verdict(results, name, claim, place)
        for name, claim in results.settings.hypotheses.items()
        for place in results.places()
        if all(results.scores(place, row, claim.measure) for row in (claim.row, claim.base))
    ]


def _verdict(results: Results, name: str, claim: Hypothesis, place: Place) -> Verdict:
    """``reproduced`` if the whole interval is where it was expected; with a reason if undecided.

    To show that a row is not above another, the interval must end below the margin, and to show
    that both are equal, ``equivalent``, lie within it: finding no difference does not show that
    there is none.
    """
    mean = estimate(differences(results, place, claim.row, claim.base, claim.measure))
    if reason := _objection(results, name, claim, place, mean):
        return Verdict(name, claim, place, mean, "undecided", reason)
    assert mean is not None
    low, high, margin = mean.low, mean.high, claim.margin
    assert low is not None
    assert high is not None
    answer: Answer = "reproduced"
    if claim.direction == "above":
        holds, fails = low > 0, high < 0
    elif claim.direction == "not_above":
        holds, fails = high <= margin, low > 0
    else:
        answer = "equivalent"
        holds, fails = -margin <= low and high <= margin, low > margin or high < -margin
    if holds or fails:
        return Verdict(name, claim, place, mean, answer if holds else "contradicted", "")
    return Verdict(name, claim, place, mean, "undecided", "the interval is too wide")


def _objection(
    results: Results, name: str, claim: Hypothesis, place: Place, mean: Estimate | None
) -> str:
    """Why the runs decide nothing, whatever their numbers; empty if they do."""
    if unlike := results.unlike(place, claim.row, claim.base):
        return f"the rows are not of the same {', '.join(unlike)}"
    keys = results.differing(place, claim.row, claim.base)
    if claim.isolates is not None and (others := not_isolated(keys, claim.isolates)):
        return f"the rows differ in {', '.join(others)} too"
    if name not in results.written:
        return "it was not noted before its runs"
    moment = datetime.fromisoformat(results.written[name])
    known = sum(
        datetime.fromisoformat(record["finished"]) <= moment
        for row in (claim.row, claim.base)
        for record in results.runs(place, row).values()
    )
    if known:
        return f"{known} of its runs were known when it was written"
    count = mean.count if mean else 0
    return f"{count} of {claim.seeds} pairs" if count < claim.seeds else ""
