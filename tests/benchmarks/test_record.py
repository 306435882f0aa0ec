"""Verdicts, and the table: it holds all rows, of which chosen ones are measured again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed import __main__ as command
from benchmarks.speed.record import cells
from benchmarks.speed.rows import ROWS
from benchmarks.speed.target import Effort, Finding, Measured, Row, Target, at_most
from solo_ext.core.files import read_jsonl


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three rows in place of all; what was measured, in order."""
    calls: list[str] = []

    def row(name: str) -> Row:
        def measure(effort: Effort) -> Measured:
            calls.append(name)
            ratio = 1.0 if name == "c" else 3.0
            return Measured([Finding(name, Target(2.0), ratio)], {"effort": effort.shrink})

        return measure

    for name in list(ROWS):
        monkeypatch.delitem(ROWS, name)
    for name in "abc":
        monkeypatch.setitem(ROWS, name, row(name))
    return calls


def test_all_rows_or_some(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "speed.jsonl"
    arguments = ["--device", "cpu", "--json", str(out)]
    assert command.main(arguments) == 0
    assert command.main([*arguments, "--rows", "b"]) == 0
    assert rows == ["a", "b", "c", "b"]
    about, *lines = read_jsonl(out)
    assert [line["row"] for line in lines] == ["a", "b", "c"]
    assert [line["findings"][0]["verdict"] for line in lines] == ["met", "met", "missed"]
    assert about["environment"]["packages"]["torch"]
    assert out.with_suffix(".md").read_text().count("| met |") == 2
    assert command.main([*arguments, "--rows", "d"]) == 2
    assert "no row 'd'" in capsys.readouterr().err


def test_check_fails_where_a_row_that_was_measured_is_missed(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--json", str(tmp_path / "speed.jsonl"), "--rows"]
    assert [command.main([*arguments, *words]) for words in (["c"], ["a", "--check"])] == [0, 0]
    assert command.main([*arguments, "b", "c", "--check"]) == 1
    assert capsys.readouterr().err == "missed: c\n"
    assert command.main([*arguments, "c", "--check", "--quick"]) == 0


@pytest.mark.parametrize(
    ("target", "measured", "verdict"),
    [
        (Target(2.0), 2.0, "met"),
        (Target(2.0), 1.99, "within the gate"),
        (Target(2.0), 1.7, "within the gate"),
        (Target(2.0), 1.69, "missed"),
        (Target(2.0), None, "not measured here"),
        (Target(2.0), math.inf, "met"),
        # No gate here: 15 % of a step is no noise.
        (at_most(1.02, "x"), 1.02, "met"),
        (at_most(1.02, "x"), 1.03, "missed"),
        (at_most(0, ""), 0.0, "met"),
        (at_most(0, ""), 1.0, "missed"),
    ],
)
def test_verdict(target: Target, measured: float | None, verdict: str) -> None:
    assert target.verdict(measured) == verdict


def test_no_target() -> None:
    assert Finding("a", None, 2.0).verdict == "no target"
    assert Finding("a", None, note="peer not installed: b").verdict == "not measured here"


def test_findings_survive_json() -> None:
    names: Any = {"ours": "b", "peer": "c", "note": "d"}
    finding = Finding("a", at_most(1, "x"), 1.5, again=1.1, memory=3.0, difference=0.1, **names)
    held = finding.as_json()
    assert held["verdict"] == "missed"
    assert Finding.from_json(held) == finding


def test_quick_tables_judge_nothing() -> None:
    finding = Finding("a", Target(2.0), 1.0)
    assert "missed" in cells(finding)
    assert "missed" not in cells(finding, verdicts=False)
