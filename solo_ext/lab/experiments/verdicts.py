"""Decides whether the runs reproduce the claims of papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from solo_ext.lab.experiments.results import Place, Results
from solo_ext.lab.experiments.settings import Hypothesis
from solo_ext.lab.experiments.statistics import (
    Estimate,
    estimate,
    holm,
    paired_differences,
    paired_p_value,
)

Answer = Literal["reproduced", "contradicted", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """Evidence of one data set and budget for or against a hypothesis.

    Attributes:
        name: name of the hypothesis.
        hypothesis: the hypothesis as it was written down.
        place: data set and budget.
        pairs: seeds that both rows have.
        estimate: mean and interval of the differences paired by seed; null without pairs.
        p_value: of the paired t test, two-sided; null for fewer than two pairs.
        adjusted: the same, adjusted by Holm's method for all tests of the benchmark.
        answer: the verdict.
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
    for name, hypothesis in results.settings.hypotheses.items():
        for place in results.places():
            row = results.scores(place, hypothesis.row, hypothesis.measure)
            base = results.scores(place, hypothesis.base, hypothesis.measure)
            if row and base:
                differences = list(paired_differences(row, base).values())
                found.append((name, hypothesis, place, differences, paired_p_value(differences)))
    adjusted = iter(holm([p for *_, p in found if p is not None]))
    made = []
    for name, hypothesis, place, differences, p_value in found:
        mean = estimate(differences)
        answer, reason = _answer(
            hypothesis,
            mean,
            results.unlike(place, hypothesis.row, hypothesis.base),
            _known_before(results, name, place),
        )
        by_holm = None if p_value is None else next(adjusted)
        made.append(
            Verdict(
                name, hypothesis, place, len(differences), mean, p_value, by_holm, answer, reason
            )
        )
    return made


def _answer(
    hypothesis: Hypothesis, mean: Estimate | None, unlike: Sequence[str], known: int | None
) -> tuple[Answer, str]:
    """``reproduced`` if the whole interval is on the expected side; with a reason if undecided.

    To show that a row is not above another, the interval must end below the margin: finding no
    difference does not show that there is none.
    """
    if unlike:
        return "undecided", f"the rows are not of the same {', '.join(unlike)}"
    if known is None:
        return "undecided", "it was not noted before its runs"
    if known:
        return "undecided", f"{known} of its runs were known when it was written"
    count = 0 if mean is None else mean.count
    if mean is None or mean.low is None or mean.high is None or count < hypothesis.seeds:
        return "undecided", f"{count} of {hypothesis.seeds} pairs"
    if hypothesis.direction == "not_above":
        if mean.high <= hypothesis.margin:
            return "reproduced", ""
        return ("contradicted", "") if mean.low > 0 else ("undecided", "the interval is too wide")
    if mean.low <= 0 <= mean.high:
        return "undecided", "the interval holds 0"
    above = mean.low > 0
    return ("reproduced" if above == (hypothesis.direction == "above") else "contradicted"), ""


def _known_before(results: Results, name: str, place: Place) -> int | None:
    """How many runs of its two rows had finished when a hypothesis was written.

    ``None`` if no time is known: edited settings are not the ones whose time was noted.
    """
    if name not in results.written:
        return None
    moment = datetime.fromisoformat(results.written[name])
    hypothesis = results.settings.hypotheses[name]
    return sum(
        datetime.fromisoformat(record["finished"]) <= moment
        for row in (hypothesis.row, hypothesis.base)
        for record in results.runs(place, row).values()
    )
