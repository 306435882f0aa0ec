"""Statistics over seeds against scipy and loops by hand; what the runs say of hypotheses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from solo_ext.lab.experiments import records
from solo_ext.lab.experiments.records import CLAIMS, note_claims, times_written
from solo_ext.lab.experiments.results import Place, Results, read_results
from solo_ext.lab.experiments.run import run_benchmark
from solo_ext.lab.experiments.statistics import (
    Estimate,
    Verdict,
    differences,
    estimate,
    holm,
    paired_p_value,
    verdicts,
)
from tests.lab.experiments.report_records import (
    noted,
    record,
    results,
    rows_of,
    settings,
    write_folder,
)

VALUES = [47.9, 44.1, 46.3, 49.2, 45.0]
OTHERS = [46.0, 44.8, 44.1, 47.0, 44.2]
BASE = [40.0, 42.0, 41.0]
ABOVE, BELOW, AROUND = [45.0, 47.2, 46.1], [35.0, 37.2, 36.1], [41.0, 40.0, 42.0]
"""Scores of seeds whose runs finished on the 2nd, 3rd and 4th of March 2026, at 10."""


@pytest.mark.parametrize("count", [2, 5])
def test_interval_is_scipys(count: int) -> None:
    values = VALUES[:count]
    found = estimate(values)
    assert found is not None
    assert found.count == count
    assert found.mean == pytest.approx(sum(values) / count)
    by_hand = math.sqrt(sum((v - sum(values) / count) ** 2 for v in values) / (count - 1))
    assert found.deviation == pytest.approx(by_hand)
    low, high = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_one_value_has_no_interval_and_none_has_nothing() -> None:
    assert estimate([3.5]) == Estimate(3.5, None, None, None, 1)
    assert estimate([]) is None


def test_differences_are_of_the_seeds_that_both_have() -> None:
    rows = [record("a", seed, knn) for seed, knn in ((3, 5.0), (1, 2.0), (2, 9.0))]
    bases = [record("b", seed, knn) for seed, knn in ((1, 1.5), (3, 7.0))]
    place = Place("digits", "default")
    assert differences(Results(settings(), rows + bases), place, "a", "b", "knn") == [0.5, -2.0]
    assert differences(Results(settings(), rows), place, "a", "b", "knn") == []


def test_p_value_is_scipys() -> None:
    pairs = [a - b for a, b in zip(VALUES, OTHERS, strict=True)]
    assert paired_p_value(pairs) == pytest.approx(stats.ttest_rel(VALUES, OTHERS).pvalue)
    # Without the pairs it is another number.
    assert paired_p_value(pairs) != pytest.approx(stats.ttest_ind(VALUES, OTHERS).pvalue)


@pytest.mark.parametrize(
    ("pairs", "p"), [([], None), ([1.0], None), ([0.0, 0.0], 1.0), ([2.0, 2.0, 2.0], 0.0)]
)
def test_p_value_at_the_edges(pairs: list[float], p: float | None) -> None:
    assert paired_p_value(pairs) == p


def test_holm_by_hand() -> None:
    # 0.01 x 4; 0.02 x 3; 0.03 x 2 = 0.06 and as much as before it; 0.9.
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def hypothesis(**given: Any) -> dict[str, Any]:
    base = {"claim": "a is better", "source": "a paper", "row": "a", "base": "b", "measure": "knn"}
    return {**base, "seeds": 3, **given}


def made(**given: Any) -> Any:
    return settings(hypotheses={"h": hypothesis(**given)})


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


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / CLAIMS).read_text().splitlines()]


def noted_on(folder: Path, given: Any, written: str) -> None:
    """As if that had been its time."""
    note_claims(given, folder)
    kept = [line | {"written": written} for line in lines(folder)]
    (folder / CLAIMS).write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def test_a_line_for_what_decides_and_none_for_words(tmp_path: Path) -> None:
    note_claims(made(), tmp_path)
    note_claims(made(), tmp_path)
    note_claims(made(note="a small data set", claim="a is the better one"), tmp_path)
    note_claims(made(margin=0), tmp_path)
    assert [line["name"] for line in lines(tmp_path)] == ["h"]
    note_claims(made(direction="below"), tmp_path)
    assert [line["hypothesis"]["direction"] for line in lines(tmp_path)] == ["above", "below"]


def test_a_changed_hypothesis_has_a_new_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_claims(made(), tmp_path)
    assert times_written(made(), tmp_path) == {"h": lines(tmp_path)[0]["written"]}
    # Settings that were edited since are not those that were noted.
    assert times_written(made(measure="linear"), tmp_path) == {}
    monkeypatch.setattr(records, "datetime", _Later)
    note_claims(made(measure="linear"), tmp_path)
    note_claims(made(), tmp_path)
    assert times_written(made(), tmp_path) == {"h": "2999-01-01T00:00:00+00:00"}


def test_it_is_noted_before_anything_is_started(tmp_path: Path) -> None:
    def looks(*_: Any) -> dict[Path, str]:
        assert [line["name"] for line in lines(tmp_path)] == ["h"]
        return {tmp_path: "seen"}

    assert run_benchmark(made(), [], tmp_path, looks)[1] == {tmp_path.name: "seen"}


class _Later(records.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls(2999, 1, 1, tzinfo=tz)


@pytest.mark.parametrize(
    ("written", "known"), [("2026-03-01T10:00:00+00:00", 0), ("2026-03-02T12:00:00+02:00", 2)]
)
def test_written_when_runs_were_known(written: str, known: int) -> None:
    (found,) = verdicts(Results(made(), rows_of({"a": ABOVE, "b": BASE}), {"h": written}))
    assert found.answer == ("undecided" if known else "reproduced")
    assert found.reason == (f"{known} of its runs were known when it was written" * bool(known))


def test_settings_that_are_edited_after_the_runs(tmp_path: Path) -> None:
    """Which only the report reads: nothing was noted of the hypothesis as it is now."""
    write_folder(tmp_path, made(direction="below"), rows_of({"a": ABOVE, "b": BASE}))
    noted_on(tmp_path, made(direction="below"), "2026-03-01T00:00:00+00:00")
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("contradicted", "")
    write_folder(tmp_path, made(note="Seen."), rows_of({"a": ABOVE, "b": BASE}))
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("undecided", "it was not noted before its runs")
    noted_on(tmp_path, made(), "2026-03-01T00:00:00+00:00")
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("reproduced", "")
    (tmp_path / CLAIMS).unlink()
    (found,) = verdicts(read_results(tmp_path))
    assert (found.answer, found.reason) == ("undecided", "it was not noted before its runs")
