"""An interrupted table goes on; one of other settings is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speed import __main__ as command
from benchmarks.speed import record
from benchmarks.speed.effort import QUICK, Effort
from benchmarks.speed.record import Record
from benchmarks.speed.rows import ROWS
from benchmarks.speed.target import Finding, Measured, Target, Whole
from solo_ext.core.errors import UserError
from solo_ext.core.files import read_jsonl

Calls = list[str]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Three rows in place of all; what was measured, in order. The second fails at first."""
    calls: Calls = []

    def row(name: str) -> Whole:
        def measure(effort: Effort) -> Measured:
            calls.append(name)
            if name == "b" and calls.count("b") == 1:
                raise KeyboardInterrupt
            return Measured([Finding(name, Target(2.0), 3.0)], {"effort": effort.shrink})

        return Whole(name, measure)

    for name in list(ROWS):
        monkeypatch.delitem(ROWS, name)
    for name in "abc":
        monkeypatch.setitem(ROWS, name, row(name))
    return calls


def test_goes_on_where_it_was_interrupted(
    rows: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "speed.jsonl"
    arguments = ["--device", "cpu", "--json", str(out)]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    assert [line["row"] for line in read_jsonl(out)[1:]] == ["a"]
    assert command.main(arguments) == 0
    assert rows == ["a", "b", "b", "c"]
    about, *lines = read_jsonl(out)
    assert [line["row"] for line in lines] == ["a", "b", "c"]
    assert lines[-1]["findings"][0]["verdict"] == "met"
    assert about["environment"]["packages"]["torch"]
    assert out.with_suffix(".md").read_text().count("| met |") == 3
    # A finished table is printed again, not measured.
    capsys.readouterr()
    assert command.main(arguments) == 0
    assert len(rows) == 4
    assert capsys.readouterr().out.count("met") == 3


def test_chosen_rows_are_added(rows: Calls, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--json", str(tmp_path / "speed.jsonl"), "--rows"]
    command.main([*arguments, "c"])
    command.main([*arguments, "a", "c"])
    assert rows == ["c", "a"]


def test_fresh_measures_again(rows: Calls, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--json", str(tmp_path / "speed.jsonl"), "--rows", "a"]
    command.main(arguments)
    command.main([*arguments, "--fresh"])
    assert rows == ["a", "a"]


def test_other_settings_are_refused(rows: Calls, tmp_path: Path) -> None:
    out = tmp_path / "speed.jsonl"
    Record(out, Effort()).add("a", Measured([], {}), 1.0)
    assert "a" in Record(out, Effort())
    with pytest.raises(UserError, match="another effort; give another --json"):
        Record(out, QUICK)
    assert "a" not in Record(out, QUICK, fresh=True)
    about, *lines = read_jsonl(out)
    out.write_text("".join(f"{json.dumps(line)}\n" for line in ({**about, "code": "0"}, *lines)))
    with pytest.raises(UserError, match="another code"):
        Record(out, Effort())
    out.write_text("[]")
    with pytest.raises(UserError, match="no record of a speed table"):
        Record(out, Effort())


def test_a_record_knows_its_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "configs" / "solo_ext" / "base" / "some.yaml"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(record, "_ROOT", tmp_path)
    digests = []
    for text in ("lr: 0.1", "lr: 0.2"):
        file.write_text(text)
        digests.append(record.code_digest())
    assert digests[0] != digests[1]


def test_an_unknown_row_is_named(
    rows: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--rows", "d", "--json", str(tmp_path / "speed.jsonl")]) == 2
    assert "no row 'd'" in capsys.readouterr().err
    assert rows == []
