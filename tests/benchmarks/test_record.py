"""A table holds all rows; chosen ones are measured again and the others stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import __main__ as command
from benchmarks.speed.rows import ROWS
from benchmarks.speed.target import Effort, Finding, Measured, Row, Target
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
