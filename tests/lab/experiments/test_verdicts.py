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
from solo_ext.lab.experiments.records import CLAIMS, note_hypotheses, times_written
from solo_ext.lab.experiments.results import Estimate, Place, Results, estimate, read_results
from solo_ext.lab.experiments.run import run_benchmark
from solo_ext.lab.experiments.verdicts import Verdict, verdicts
from tests.conftest import json_lines
from tests.lab.experiments.report_records import (
    noted,
    record,
    results,
    rows_of,
    settings,
    write_folder,
)

VALUES = [47.9, 44.1, 46.3, 49.2, 45.0]
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
    found = Results(settings(), rows + bases).difference(place, "a", "b", "knn")
    assert found == estimate([0.5, -2.0])
    assert Results(settings(), rows).difference(place, "a", "b", "knn") is None


def hypothesis(**given: Any) -> dict[str, Any]:
    base = {"claim": "a is better", "source": "a paper", "row": "a", "base": "b", "measure": "knn"}
    return {**base, "seeds": 3, **given}


def made(**given: Any) -> Any:
    return settings(hypotheses={"h": hypothesis(**given)})


def verdict(scores: Sequence[float], **given: Any) -> Verdict:
    (found,) = verdicts(results({"a": scores, "b": BASE}, hypotheses={"h": hypothesis(**given)}))
    return found


@pytest.mark.parametrize(
    ("scores", "direction", "margin", "answer"),
    [
        (ABOVE, "above", 0.0, "reproduced"),
        (BELOW, "above", 0.0, "contradicted"),
        (AROUND, "above", 0.0, "undecided"),
        (BELOW, "not_above", 0.0, "reproduced"),
        (AROUND, "not_above", 0.0, "undecided"),
        (AROUND, "not_above", 9.0, "reproduced"),
        (ABOVE, "not_above", 0.0, "contradicted"),
        (ABOVE, "not_above", 9.0, "reproduced"),
        (ABOVE, "not_above", 3.0, "contradicted"),
        (ABOVE, "not_above", 5.0, "undecided"),
        (AROUND, "equal", 9.0, "equivalent"),
        (AROUND, "equal", 4.0, "undecided"),
        (ABOVE, "equal", 3.0, "contradicted"),
        (BELOW, "equal", 3.0, "contradicted"),
        (ABOVE, "equal", 5.0, "undecided"),
    ],
)
def test_verdict_by_the_place_of_the_interval(
    scores: list[float], direction: str, margin: float, answer: str
) -> None:
    """Five more or less points in each pair, give or take 0.3; around none, give or take 5."""
    found = verdict(scores, direction=direction, margin=margin)
    assert found.answer == answer
    assert found.reason == ("the interval is too wide" if answer == "undecided" else "")
    low, high = stats.ttest_rel(scores, BASE).confidence_interval(0.95)
    assert found.estimate is not None
    assert (found.estimate.low, found.estimate.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(
    ("records", "seeds", "reason"),
    [
        (rows_of({"a": ABOVE, "b": BASE}), 5, "3 of 5 pairs"),
        (rows_of({"a": [50.0], "b": BASE}), 2, "1 of 2 pairs"),
        ([record("a", 1), record("b", 2)], 3, "0 of 3 pairs"),
    ],
)
def test_too_few_pairs_decide_nothing(records: Any, seeds: int, reason: str) -> None:
    given = made(seeds=seeds)
    (found,) = verdicts(Results(given, records, noted(given)))
    assert (found.answer, found.reason) == ("undecided", reason)


@pytest.mark.parametrize(
    ("isolates", "reason"),
    [
        (None, ""),
        (["optimizer"], ""),
        (["optimizer.lr"], ""),
        (["optimizer.l", "backbone"], "the rows differ in optimizer.lr too"),
        ([], "the rows differ in optimizer.lr too"),
    ],
)
def test_rows_that_differ_in_more_decide_nothing(isolates: Any, reason: str) -> None:
    """Which a change of ``isolates`` may say of runs that are known."""
    given = made(isolates=isolates)
    records = rows_of({"a": ABOVE, "b": BASE})
    for run in records[:3]:
        run["config"] = {**run["config"], "optimizer": {"lr": 0.3}}
    (found,) = verdicts(Results(given, records, noted(made())))
    assert found.answer == ("undecided" if reason else "reproduced")
    assert found.reason == reason


def test_every_data_set_and_budget_has_a_verdict() -> None:
    made = settings(
        datasets={"digits": [], "cifar10": []},
        budgets={"short": [], "long": ["max_epochs=9"]},
        hypotheses={"h": hypothesis()},
    )
    records = [
        *rows_of({"a": ABOVE, "b": BASE}, dataset="digits", budget="long"),
        *rows_of({"a": BELOW, "b": BASE}, dataset="cifar10", budget="short"),
    ]
    found = {tuple(v.place): v.answer for v in verdicts(Results(made, records, noted(made)))}
    assert found == {("digits", "long"): "reproduced", ("cifar10", "short"): "contradicted"}
    assert verdicts(Results(made, rows_of({"b": BASE}), noted(made))) == []


def lines(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / CLAIMS)


def noted_on(folder: Path, given: Any, written: str) -> None:
    """As if that had been its time."""
    note_hypotheses(given, folder)
    kept = [line | {"written": written} for line in lines(folder)]
    (folder / CLAIMS).write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def test_a_line_for_what_decides_and_none_for_words(tmp_path: Path) -> None:
    note_hypotheses(made(), tmp_path)
    note_hypotheses(made(), tmp_path)
    note_hypotheses(made(note="a small data set", claim="better", isolates=["optimizer"]), tmp_path)
    note_hypotheses(made(margin=0), tmp_path)
    assert [line["name"] for line in lines(tmp_path)] == ["h"]
    note_hypotheses(made(direction="not_above"), tmp_path)
    assert [line["hypothesis"]["direction"] for line in lines(tmp_path)] == ["above", "not_above"]


def test_what_it_isolates_may_be_narrowed_alone(tmp_path: Path) -> None:
    """Wider, it would let runs decide that differ in more than was written down."""
    keys = ["method_kwargs.beta", "optimizer.lr"]
    note_hypotheses(made(isolates=keys), tmp_path)
    assert times_written(made(isolates=keys[:1]), tmp_path) != {}
    for wider in ([*keys, "optimizer"], ["method_kwargs"], None):
        assert times_written(made(isolates=wider), tmp_path) == {}, wider
    note_hypotheses(made(isolates=["optimizer"]), tmp_path)
    assert [line["hypothesis"]["isolates"] for line in lines(tmp_path)] == [keys, ["optimizer"]]
    assert times_written(made(isolates=["optimizer.lr"]), tmp_path) != {}
    assert times_written(made(isolates=["optimize"]), tmp_path) == {}


def test_other_rows_under_the_same_names_are_a_change(tmp_path: Path) -> None:
    """Runs that are known would decide the opposite, if two rows changed their names."""
    note_hypotheses(made(), tmp_path)
    rows = {name: row.model_dump() for name, row in made().rows.items()}
    swapped = {"a": {**rows["b"], "bases": ["b"]}, "b": {**rows["a"], "bases": []}}
    for change, known in (
        (swapped, False),
        ({"a": {**rows["a"], "changes": ["optimizer.lr=1"]}}, False),
        ({"a": {**rows["a"], "label": "other words", "bases": []}}, True),
    ):
        given = settings(hypotheses={"h": hypothesis()}, rows=rows | change)
        assert (times_written(given, tmp_path) != {}) == known, change
    # Lines of earlier versions do not have the rows.
    (line,) = lines(tmp_path)
    del line["rows"]
    (tmp_path / CLAIMS).write_text(json.dumps(line) + "\n")
    assert times_written(made(), tmp_path) != {}


@pytest.mark.parametrize(
    "change",
    [
        {"written": None},
        {"written": "yesterday"},
        {"written": "2026-03-01T00:00:00"},
        {"hypothesis": "text"},
        {"name": ["h"]},
    ],
    ids=str,
)
def test_damaged_lines_note_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    note_hypotheses(made(), tmp_path)
    (line,) = lines(tmp_path)
    (tmp_path / CLAIMS).write_text(json.dumps(line | change) + "\n")
    assert times_written(made(), tmp_path) == {}


def test_a_changed_hypothesis_has_a_new_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_hypotheses(made(), tmp_path)
    assert times_written(made(), tmp_path) == {"h": lines(tmp_path)[0]["written"]}
    # Settings that were edited since are not those that were noted.
    assert times_written(made(measure="linear"), tmp_path) == {}
    monkeypatch.setattr(records, "datetime", _Later)
    note_hypotheses(made(measure="linear"), tmp_path)
    note_hypotheses(made(), tmp_path)
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
    write_folder(tmp_path, made(direction="not_above"), rows_of({"a": ABOVE, "b": BASE}))
    noted_on(tmp_path, made(direction="not_above"), "2026-03-01T00:00:00+00:00")
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
