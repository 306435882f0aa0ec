"""Verdicts, and the table: it holds all rows, of which chosen ones are measured again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import page
from benchmarks.record import Effort, Finding, Measured, Record, Row, Target, at_most, table
from benchmarks.rows import ROWS
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
    assert command.main([*arguments, "b"]) == 0
    assert rows == ["a", "b", "c", "b"]
    lines = read_jsonl(out)
    assert [line["row"] for line in lines] == ["a", "b", "c"]
    assert [line["findings"][0]["verdict"] for line in lines] == ["met", "met", "missed"]
    assert all(line["environment"]["packages"]["torch"] for line in lines)
    assert out.with_suffix(".md").read_text().count("| met |") == 2
    assert command.main([*arguments, "d"]) == 2
    assert "no row 'd'" in capsys.readouterr().err


def test_check_fails_where_a_row_that_was_measured_is_missed(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--json", str(tmp_path / "speed.jsonl")]
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
        (Target(2.0), None, "not measured"),
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
    assert Finding("a", None, note="peer not installed: b").verdict == "not measured"


def test_findings_survive_the_record(tmp_path: Path) -> None:
    names: Any = {"ours": "b", "peer": "c", "note": "d"}
    finding = Finding("a", at_most(1, "x"), 1.5, again=1.1, memory=3.0, difference=0.1, **names)
    Record(tmp_path / "r.jsonl").add("row", Measured([finding], {}), Effort(), 1.0)
    held = Record(tmp_path / "r.jsonl")
    assert held.findings("row") == [finding]
    assert held.rows["row"]["findings"][0]["verdict"] == "missed"


def test_quick_tables_judge_nothing() -> None:
    finding = Finding("a", Target(2.0), 1.0)
    assert "| missed |" in table([finding])
    assert "| missed |" not in table([finding], verdicts=False)


def test_the_page_says_what_the_records_hold() -> None:
    for file, text in page.files().items():
        assert file.read_text() == text, f"{file}: run python -m benchmarks.page"


def test_what_is_written_goes_to_the_page(
    rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "page.md"
    made.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    monkeypatch.setattr(page, "PAGE", made)
    for module in (page, command):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert command.main(["--device", "cpu", "--write", "a", "c"]) == 0
    text = made.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `a` |" in text
    assert command.main(["--quick", "--write"]) == 2
