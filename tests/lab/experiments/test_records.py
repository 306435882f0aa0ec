"""The file of records, and what a killed process leaves in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from solo_ext.core.errors import UserError
from solo_ext.lab.experiments import run
from solo_ext.lab.experiments.records import RECORDS, Record, append_records, read_records
from solo_ext.lab.experiments.work import read_epochs


def record(key: str, **more: Any) -> Any:
    whole = dict.fromkeys(Record.__annotations__.keys() - {"parts"})
    return {**whole, "key": key, "row": "simclr", **more}


def test_records_are_appended(tmp_path: Path) -> None:
    append_records(tmp_path, [record("a"), record("b")])
    append_records(tmp_path, [record("c")])
    assert [r["key"] for r in read_records(tmp_path)] == ["a", "b", "c"]
    assert len((tmp_path / RECORDS).read_text().splitlines()) == 3


def test_the_last_record_of_a_key_counts(tmp_path: Path) -> None:
    append_records(tmp_path, [record("a", seed=1), record("a", seed=2)])
    assert [r["seed"] for r in read_records(tmp_path)] == [2]


@pytest.mark.fault
@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_half_written_line_is_passed_over_and_written_over(tmp_path: Path, cut: int) -> None:
    append_records(tmp_path, [record("a"), record("b" * 40)])
    file = tmp_path / RECORDS
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert next(r["key"] for r in read_records(tmp_path)) == "a"
    append_records(tmp_path, [record("c")])
    lines = [json.loads(line)["key"] for line in file.read_text().splitlines()]
    assert lines == ["a", "c"]


@pytest.mark.fault
@pytest.mark.parametrize("damaged", ["nonsense", '{"key": "z"}', "[]", "3"])
def test_a_damaged_line_is_named(tmp_path: Path, damaged: str) -> None:
    append_records(tmp_path, [record("a"), record("b")])
    first, second = (tmp_path / RECORDS).read_text().splitlines()
    (tmp_path / RECORDS).write_text(f"{first}\n{damaged}\n{second}\n")
    with pytest.raises(UserError, match="line 2"):
        read_records(tmp_path)


@pytest.mark.fault
@pytest.mark.parametrize("damaged", ["", "nonsense", "{}", "[]"])
def test_a_damaged_record_of_a_run_is_named(tmp_path: Path, damaged: str) -> None:
    file = tmp_path / run.RUNS / "digits-simclr-0-abc" / run.RECORD
    file.parent.mkdir(parents=True)
    file.write_text(damaged)
    with pytest.raises(UserError, match="not a record of a run; remove it"):
        run._collect(tmp_path, {}, [file.parent.name])


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no records\.jsonl"):
        read_records(tmp_path)


def test_an_epoch_that_was_repeated_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "epochs.jsonl"
    lines = [
        {"epoch": 0, "images": 4, "seconds": 1.0},
        {"epoch": 1, "images": 4, "seconds": 9.0},
        {"epoch": 1, "images": 4, "seconds": 2.0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"epoch": 2, "im')
    assert [e["seconds"] for e in read_epochs(file)] == [1.0, 2.0]
    assert read_epochs(tmp_path / "none") == []
