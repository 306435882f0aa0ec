"""The table of results of the README."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import update_readme
from scripts.update_readme import BEGIN, END, readme_table, updated
from solo_ext.core.errors import UserError
from tests.lab.experiments.report_records import record, rows_of, settings, write_folder

A, B = [50.0, 53.0, 52.0], [48.0, 49.0, 51.0]
README = f"# Title\n\n{BEGIN}\nold\n{END}\n\nRest.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    claim = {"claim": "c", "source": "s", "row": "a", "base": "b", "measure": "knn"}
    made = settings(hypotheses={"h": claim}, headline=["knn", "linear", "third"])
    return write_folder(tmp_path / "results" / "small", made, rows_of({"a": A, "b": B[:2]}))


def test_table(folder: Path, tmp_path: Path) -> None:
    assert readme_table([folder], tmp_path) == (
        "**A benchmark** ([report](results/small/report.md))\n\n"
        "|  | knn | linear |\n| --- | --: | --: |\n"
        "| a | **51.67 ± 1.53** | **61.67 ± 1.53** |\n"
        "| b | 48.50 ± 0.71 (n = 2) | 58.50 ± 0.71 (n = 2) |\n\n"
        "digits. Percent, mean ± deviation over seeds; n where it is not 3. Bold: the highest "
        "mean, which need not be apart from the next. Claims of papers: 1 undecided."
    )


def test_data_sets_are_columns(tmp_path: Path) -> None:
    made = settings(datasets={"digits": {}, "cifar10": {}}, headline=["knn"])
    records = [*rows_of({"a": A}), record("b", 1, 40.0, dataset="cifar10")]
    lines = readme_table([write_folder(tmp_path, made, records)], tmp_path).splitlines()
    assert lines[2] == "|  | digits: knn | cifar10: knn |"
    assert lines[4:6] == ["| a | **51.67 ± 1.53** | – |", "| b | – | **40.00 (n = 1)** |"]


def test_what_is_around_the_markers_stays() -> None:
    assert updated(README, "new") == README.replace("old", "new")
    assert updated(updated(README, "new"), "new") == updated(README, "new")


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_markers_must_be_there(text: str) -> None:
    with pytest.raises(UserError, match="README: needs"):
        updated(text, "new")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*args: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["update_readme.py", *map(str, args)])
        return update_readme.main()

    return call


def test_script_writes_and_checks(
    script: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    assert script(folder, "--readme", readme, "--check") == 1
    assert "not what the records say" in capsys.readouterr().err
    assert readme.read_text() == README
    assert script(folder, "--readme", readme) == 0
    assert readme.read_text() == updated(README, readme_table([folder], tmp_path))
    assert script(folder, "--readme", readme, "--check") == 0
    # One number of one record.
    write_folder(folder, settings(), rows_of({"a": [50.0, 53.0, 52.1], "b": B}))
    assert script(folder, "--readme", readme, "--check") == 1


def test_script_names_what_is_wrong(
    script: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no markers")
    assert script(folder, "--readme", readme) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_readme_is_what_the_records_say(script: Callable[..., int]) -> None:
    assert script("--check") == 0
