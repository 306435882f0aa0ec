"""What the runs say of hypotheses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scipy import stats

from solo_ext.lab.experiments.results import Results
from solo_ext.lab.experiments.verdicts import Verdict, verdicts
from tests.lab.experiments.report_records import noted, record, results, rows_of, settings

BASE = [40.0, 42.0, 41.0]
ABOVE, BELOW, AROUND = [45.0, 47.2, 46.1], [35.0, 37.2, 36.1], [41.0, 40.0, 42.0]


def hypothesis(**given: Any) -> dict[str, Any]:
    base = {"claim": "a is better", "source": "a paper", "row": "a", "base": "b", "measure": "knn"}
    return {**base, "seeds": 3, **given}


def verdict(scores: Sequence[float], **given: Any) -> Verdict:
    (found,) = verdicts(results({"a": scores, "b": BASE}, hypotheses={"h": hypothesis(**given)}))
    return found


@pytest.mark.parametrize(
    ("scores", "direction", "answer"),
    [
        (ABOVE, "above", "reproduced"),
        (BELOW, "above", "contradicted"),
        (ABOVE, "below", "contradicted"),
        (BELOW, "below", "reproduced"),
        (AROUND, "above", "undecided"),
        (AROUND, "below", "undecided"),
    ],
)
def test_verdict_by_side_of_the_interval(scores: list[float], direction: str, answer: str) -> None:
    found = verdict(scores, direction=direction)
    assert found.answer == answer
    assert found.reason == ("the interval holds 0" if answer == "undecided" else "")
    assert found.p_value == pytest.approx(stats.ttest_rel(scores, BASE).pvalue)
    assert (found.p_value < 0.05) == (answer != "undecided")


@pytest.mark.parametrize(
    ("scores", "margin", "answer"),
    [
        (BELOW, 0.0, "reproduced"),
        (AROUND, 0.0, "undecided"),
        (AROUND, 9.0, "reproduced"),
        (ABOVE, 0.0, "contradicted"),
        (ABOVE, 9.0, "reproduced"),
        (ABOVE, 5.0, "contradicted"),
    ],
)
def test_not_above_needs_an_interval_below_the_margin(
    scores: list[float], margin: float, answer: str
) -> None:
    """Five more or less points in each pair, give or take 0.3; around none, give or take 5."""
    assert verdict(scores, direction="not_above", margin=margin).answer == answer


def test_too_few_seeds_decide_nothing() -> None:
    found = verdict(ABOVE, seeds=5)
    assert (found.answer, found.reason) == ("undecided", "3 of 5 pairs")
    assert found.p_value is not None
    found = verdict([50.0], seeds=2)
    assert (found.answer, found.reason) == ("undecided", "1 of 2 pairs")
    assert found.p_value is found.adjusted is None


def test_rows_without_a_common_seed() -> None:
    made = settings(hypotheses={"h": hypothesis()})
    (found,) = verdicts(Results(made, [record("a", 1), record("b", 2)], noted(made)))
    assert (found.answer, found.reason) == ("undecided", "0 of 3 pairs")
    assert found.estimate is None


def test_no_verdict_where_a_row_has_no_runs() -> None:
    assert verdicts(results({"b": BASE}, hypotheses={"h": hypothesis()})) == []


def test_holm_is_over_all_tests_of_the_benchmark() -> None:
    both = {
        "x": hypothesis(),
        "y": hypothesis(row="pixels"),
        "z": hypothesis(row="pixels", base="a"),
    }
    found = verdicts(results({"a": ABOVE, "b": BASE, "pixels": AROUND}, hypotheses=both))
    p = sorted(v.p_value for v in found if v.p_value is not None)
    assert [v.adjusted for v in sorted(found, key=lambda v: v.p_value or 0)] == pytest.approx(
        [3 * p[0], max(3 * p[0], 2 * p[1]), max(3 * p[0], 2 * p[1], p[2])]
    )


def test_every_data_set_and_budget_has_a_verdict() -> None:
    made = settings(
        datasets={"digits": {}, "cifar10": {}},
        budgets={"short": [], "long": ["max_epochs=9"]},
        hypotheses={"h": hypothesis()},
    )
    records = [
        *rows_of({"a": ABOVE, "b": BASE}, dataset="digits", budget="long"),
        *rows_of({"a": BELOW, "b": BASE}, dataset="cifar10", budget="short"),
    ]
    found = {tuple(v.place): v.answer for v in verdicts(Results(made, records, noted(made)))}
    assert found == {("digits", "long"): "reproduced", ("cifar10", "short"): "contradicted"}
