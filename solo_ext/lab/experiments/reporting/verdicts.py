"""Whether the runs reproduce what papers claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from solo_ext.lab.experiments.reporting.results import Place, Results
from solo_ext.lab.experiments.reporting.statistics import (
    Estimate,
    estimate,
    holm,
    paired_differences,
    paired_p_value,
)
from solo_ext.lab.experiments.settings import Hypothesis

Answer = Literal["reproduced", "contradicted", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What one data set and budget say of a hypothesis.

    Attributes:
        name: of the hypothesis.
        hypothesis: as it was written down.
        place: data set and budget.
        differences: row minus base by seed.
        estimate: their mean and interval; null without pairs.
        p_value: of the paired t test, two-sided; null for fewer than two pairs.
        adjusted: the same by Holm's method among all tests of the benchmark.
        answer: the verdict.
        reason: why it is undecided, else empty.
    """

    name: str
    hypothesis: Hypothesis
    place: Place
    differences: dict[int, float]
    estimate: Estimate | None
    p_value: float | None
    adjusted: float | None
    answer: Answer
    reason: str


def verdicts(results: Results) -> list[Verdict]:
    """One for each hypothesis, data set and budget that has records of both rows."""
    found = [
        (name, hypothesis, place, paired_differences(*both))
        for name, hypothesis in results.settings.hypotheses.items()
        for place in results.places()
        if all(
            both := tuple(
                results.scores(place, row, hypothesis.measure)
                for row in (hypothesis.row, hypothesis.base)
            )
        )
    ]
    p_values = [paired_p_value(list(differences.values())) for *_, differences in found]
    tested = [index for index, p in enumerate(p_values) if p is not None]
    adjusted = dict(zip(tested, holm([p for p in p_values if p is not None]), strict=True))
    made = []
    for index, (name, hypothesis, place, differences) in enumerate(found):
        mean = estimate(list(differences.values()))
        made.append(
            Verdict(
                name,
                hypothesis,
                place,
                differences,
                mean,
                p_values[index],
                adjusted.get(index),
                *_answer(
                    hypothesis,
                    mean,
                    results.unlike(place, hypothesis.row, hypothesis.base),
                    _known_before(results, name, place),
                ),
            )
        )
    return made


def _answer(
    hypothesis: Hypothesis, mean: Estimate | None, unlike: Sequence[str], known: int | None
) -> tuple[Answer, str]:
    """``reproduced`` where the whole interval is on the expected side, and why if undecided.

    That a row is not above needs an interval that ends below the margin: to find no difference
    is not to show that there is none.
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

    ``None`` where nobody noted when that was: settings that were edited since are not those that
    were noted.
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
