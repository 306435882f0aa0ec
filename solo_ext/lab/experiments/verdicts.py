"""Decides hypotheses by confidence intervals over seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from solo_ext.lab.experiments.results import Estimate, Place, Results
from solo_ext.lab.experiments.settings import Hypothesis

Answer = Literal["reproduced", "equivalent", "contradicted", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """Evidence of one data set and budget for or against a hypothesis.

    Attributes:
        estimate: mean and interval of the differences paired by seed; null without pairs.
        reason: why the answer is undecided, otherwise empty.

    >>> claim = Hypothesis(claim="it helps", source="a paper", row="a", base="b", measure="knn")
    >>> place = Place("digits", "default")
    >>> Verdict("nnclr", claim, place, None, "undecided", "0 of 5 pairs").hypothesis.direction
    'above'
    """

    name: str
    hypothesis: Hypothesis
    place: Place
    estimate: Estimate | None
    answer: Answer
    reason: str


def verdicts(results: Results) -> list[Verdict]:
    """One verdict per hypothesis, data set and budget with records of both rows.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> verdicts(Results(read_benchmark("claims_e2"), []))
    []
    """
    return [
        _verdict(results, name, claim, place)
        for name, claim in results.settings.hypotheses.items()
        for place in results.places()
        if all(results.scores(place, row, claim.measure) for row in (claim.row, claim.base))
    ]


def _verdict(results: Results, name: str, claim: Hypothesis, place: Place) -> Verdict:
    """The verdict: ``reproduced`` if the whole interval is on the side that is claimed.

    To show that a row is not above another, the interval must end at or below the margin. To show
    that both are ``equivalent``, it must lie within the margin: finding no difference does not show
    that there is none.
    """
    mean = results.difference(place, claim.row, claim.base, claim.measure)
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
        holds, fails = high <= margin, low > margin
    else:
        answer = "equivalent"
        holds, fails = -margin <= low and high <= margin, low > margin or high < -margin
    if holds or fails:
        return Verdict(name, claim, place, mean, answer if holds else "contradicted", "")
    return Verdict(name, claim, place, mean, "undecided", "the interval is too wide")


def _objection(
    results: Results, name: str, claim: Hypothesis, place: Place, mean: Estimate | None
) -> str:
    """Why the runs cannot decide, whatever their scores; empty if they can."""
    if unlike := results.unlike(place, claim.row, claim.base):
        return f"the rows are not of the same {', '.join(unlike)}"
    keys = results.differing(place, claim.row, claim.base)
    if claim.isolates is not None and (others := _not_isolated(keys, claim.isolates)):
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


def _not_isolated(keys: Iterable[str], isolates: Iterable[str]) -> list[str]:
    """Keys that differ although ``isolates`` names neither them nor their section."""
    return [key for key in keys if not f"{key}.".startswith(tuple(f"{own}." for own in isolates))]
