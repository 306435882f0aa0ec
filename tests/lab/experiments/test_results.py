"""Records against settings: what is kept, missing, left out, averaged; damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines
from solo_ext.lab.experiments import run
from solo_ext.lab.experiments.records import RECORDS, read_records
from solo_ext.lab.experiments.results import Place, Results, _differing_keys, read_results
from tests.lab.experiments.report_records import record, results, rows_of, settings, write_folder

DIGITS = Place("digits", "default")


def test_scores_by_seed() -> None:
    broken = record("b", 2, scores={"knn": float("nan")})
    found = Results(settings(), [*rows_of({"a": [50.0, 51.0, 52.0], "b": [40.0]}), broken])
    assert found.places() == [DIGITS]
    assert found.rows(DIGITS) == ["a", "b"]
    assert found.scores(DIGITS, "a", "knn") == {1: 50.0, 2: 51.0, 3: 52.0}
    assert found.scores(DIGITS, "b", "linear") == {1: 50.0}
    assert found.scores(DIGITS, "b", "nothing") == {}
    assert found.left_out == []


def test_missing_runs_are_those_of_the_stages() -> None:
    found = results({"b": [40.0, 41.0]})
    assert found.missing(DIGITS) == {"a": [1, 2, 3], "b": [3], "pixels": [1, 2, 3]}
    stage = {"budget": "default", "rows": ["b"], "seeds": [1, 3, 9]}
    near = {"budget": "default", "rows": ["a"], "seeds": [1], "near": 1.0}
    found = results({"b": [40.0, 41.0]}, stages={"first": stage, "second": near})
    assert found.missing(DIGITS) == {"b": [3]}
    # One run of raw pixels is all of them.
    found = results({"pixels": [40.0], "b": [1.0] * 3, "a": [1.0] * 3})
    assert found.missing(DIGITS) == {}


def test_a_teacher_is_missing_where_it_is_trained() -> None:
    stage = {"budget": "short", "rows": ["teacher", "b"], "seeds": [1], "teacher_budget": "long"}
    made = settings(
        rows={"teacher": {"config": "teacher"}, "b": {"config": "simclr"}},
        teacher="teacher",
        budgets={"short": [], "long": ["max_epochs=9"]},
        stages={"only": stage},
    )
    found = Results(made, [record("b", 1, budget="short")])
    assert found.missing(Place("digits", "short")) == {}
    assert found.missing(Place("digits", "long")) == {"teacher": [0]}


def test_unfinished_lines_of_other_rows_or_damaged_ones_do_not_count() -> None:
    line = {"dataset": "digits", "budget": "default", "row": "a", "seed": 2, "epochs": 1, "of": 4}
    others: list[dict[str, Any]] = [
        {},
        *({**line, **change} for change in ({"row": "gone"}, {"row": ["a"]}, {"budget": "x"})),
        {**line, "seed": 1},
    ]
    found = Results(settings(), rows_of({"a": [50.0]}), unfinished=[*others, line])
    assert found.unfinished(DIGITS) == [line]


def test_teacher_has_a_seed_of_its_own() -> None:
    rows = {"teacher": {"config": "teacher"}, "b": {"config": "simclr"}}
    made = settings(rows=rows, teacher="teacher")
    found = Results(made, [record("teacher", 0, kind="teacher"), *rows_of({"b": [1.0, 2.0, 3.0]})])
    assert found.missing(DIGITS) == {}
    assert found.left_out == []
    assert found.best(DIGITS, "knn") == ["b"]


def test_what_the_settings_do_not_name_is_left_out_and_said() -> None:
    records = [
        *rows_of({"a": [1.0, 2.0, 3.0], "strange": [1.0]}),
        record("a", 9),
        record("a", 1, dataset="elsewhere"),
        record("a", 1, budget="long"),
    ]
    found = Results(settings(), records)
    assert len(found.records) == 3
    assert sorted(found.left_out) == [
        "digits default a 9",
        "digits default strange 1",
        "digits long a 1",
        "elsewhere default a 1",
    ]
    assert found.measures == ["knn", "linear"]
    # Of two runs of a place the later one counts.
    late = record("a", 1, 70.0, key="other", finished="2026-05-01T00:00:00+00:00")
    found = Results(settings(headline=None), [late, *rows_of({"a": [50.0]})])
    assert found.scores(DIGITS, "a", "knn") == {1: 70.0}
    assert found.left_out == ["digits default a 1"]
    assert found.measures == ["knn", "linear"]


def test_curve_is_of_epochs_that_all_seeds_measured() -> None:
    first = record("a", 1, 50.0)
    second = record(
        "a",
        2,
        curves={
            "epochs": [0, 2, 4],
            "seconds": [0.0, 40.0, 80.0],
            "scores": {"knn": [20.0, None, 60.0]},
        },
    )
    third = record("a", 3, curves=None)
    found = Results(settings(), [first, second, third])
    assert found.curve(DIGITS, "a", "knn") == [(0, 0.0, 25.0), (4, 70.0, 55.0)]
    assert found.curve(DIGITS, "a", "nothing") == []
    assert Results(settings(), [third]).curve(DIGITS, "a", "knn") == []


def test_folder_is_read(tmp_path: Path) -> None:
    space = {"optimizer.lr": {"low": 0.1, "high": 1.0}}
    made = settings(rows={"a": {"config": "simclr", "space": space}}, tuning={})
    found = read_results(write_folder(tmp_path / "one", made, rows_of({"a": [1.0, 2.0]})))
    assert found.settings == made
    assert found.scores(DIGITS, "a", "knn") == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no benchmark.yaml"),
        ("{", "not YAML"),
        ("- 1", "no benchmark.yaml with settings"),
        ("title: 3", "title=3"),
    ],
)
def test_settings_that_are_none(tmp_path: Path, text: str | None, problem: str) -> None:
    folder = write_folder(tmp_path, settings(), rows_of({"a": [1.0]}))
    (folder / "benchmark.yaml").unlink()
    if text is not None:
        (folder / "benchmark.yaml").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_results(folder)


def line(key: str, **more: Any) -> dict[str, Any]:
    return {**record("a", 1), "key": key, **more}


def test_the_last_record_of_a_key_counts(tmp_path: Path) -> None:
    append_lines(tmp_path / RECORDS, [line("a", seed=1), line("b")])
    append_lines(tmp_path / RECORDS, [line("a", seed=2)])
    assert [(r["key"], r["seed"]) for r in read_records(tmp_path)] == [("a", 2), ("b", 1)]


@pytest.mark.fault
@pytest.mark.parametrize("cut", [2, 8, 57])
def test_a_half_written_line_is_passed_over_and_written_over(tmp_path: Path, cut: int) -> None:
    append_lines(tmp_path / RECORDS, [line("a"), line("b" * 40)])
    file = tmp_path / RECORDS
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert next(r["key"] for r in read_records(tmp_path)) == "a"
    append_lines(tmp_path / RECORDS, [line("c")])
    assert [json.loads(text)["key"] for text in file.read_text().splitlines()] == ["a", "c"]


def test_a_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    """Records that were copied from elsewhere may end so."""
    (tmp_path / RECORDS).write_text(json.dumps(line("a")))
    append_lines(tmp_path / RECORDS, [line("b")])
    assert [r["key"] for r in read_records(tmp_path)] == ["a", "b"]


@pytest.mark.fault
@pytest.mark.parametrize(
    "damaged",
    [
        *("nonsense", '{"key": "z"}', "[]"),
        *(json.dumps(record("a", 1, **change)) for change in ({"scores": 3}, {"finished": "x"})),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: str) -> None:
    append_lines(tmp_path / RECORDS, [line("a"), line("b")])
    first, second = (tmp_path / RECORDS).read_text().splitlines()
    (tmp_path / RECORDS).write_text(f"{first}\n{damaged}\n{second}\n")
    with pytest.raises(UserError, match="line 2"):
        read_records(tmp_path)


@pytest.mark.fault
@pytest.mark.parametrize("damaged", ["", "{}"])
def test_a_damaged_record_of_a_run_is_named(tmp_path: Path, damaged: str) -> None:
    planned: Any = SimpleNamespace(folder="digits-simclr-0-abc", key="abc")
    file = tmp_path / run.RUNS / planned.folder / run.RECORD
    file.parent.mkdir(parents=True)
    file.write_text(damaged)
    with pytest.raises(UserError, match=r"record\.json' cannot be read"):
        run._collect(tmp_path, [planned], {})


def test_keys_that_came_later_do_not_differ() -> None:
    # Where a run is repeated may need more workers; they change no result.
    one = {"seed": 1, "optimizer": {"lr": 0.3, "name": "sgd"}, "data": {"num_workers": 2}}
    other = {"seed": 2, "optimizer": {"lr": 0.1, "name": "sgd"}, "data": {"num_workers": 12}}
    assert _differing_keys(one, other) == ["optimizer.lr"]
    assert (
        _differing_keys({"max_epochs": 1}, {"max_epochs": 1, "performance": {"compile": False}})
        == []
    )
    view = {"crop_size": 32}
    later = {"augmentations": [{**view, "random_erasing": None}]}
    assert _differing_keys({"augmentations": [view]}, later) == []
