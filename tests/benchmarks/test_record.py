"""A table holds all rows; chosen ones are measured again and the others stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import __main__ as command
from benchmarks.speed.rows import ROWS
from benchmarks.speed.target import Effort, Finding, Measured, Target, Whole
from solo_ext.core.files import read_jsonl


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three rows in place of all; what was measured, in order."""
    calls: list[str] = []

    def row(name: str) -> Whole:
        def measure(effort: Effort) -> Measured:
            calls.append(name)
            return Measured([Finding(name, Target(2.0), 3.0)], {"effort": effort.shrink})

        return Whole(name, measure)

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
    assert lines[-1]["findings"][0]["verdict"] == "met"
    assert about["environment"]["packages"]["torch"]
    assert out.with_suffix(".md").read_text().count("| met |") == 3
    assert command.main([*arguments, "--rows", "d"]) == 2
    assert "no row 'd'" in capsys.readouterr().err
