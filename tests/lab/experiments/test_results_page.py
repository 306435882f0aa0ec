"""Tables and picture of the page of results."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import update_results
from scripts.update_results import BEGIN, END, contents, picture, tables
from solo_ext.lab.experiments.results import read_results
from tests.lab.experiments.report_records import record, rows_of, settings, write_folder

A, B = [50.0, 53.0, 52.0], [48.0, 49.0, 51.0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    claim = {"claim": "c", "source": "s", "row": "a", "base": "b", "measure": "knn"}
    made = settings(hypotheses={"h": claim}, headline=["knn", "linear", "knn_third"])
    return write_folder(tmp_path / "results" / "small", made, rows_of({"a": A, "b": B[:2]}))


def test_table(folder: Path, tmp_path: Path) -> None:
    assert tables([folder], tmp_path) == (
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
    lines = tables([write_folder(tmp_path, made, records)], tmp_path).splitlines()
    assert lines[2] == "|  | digits: knn | cifar10: knn |"
    assert lines[4:6] == ["| a | **51.67 ± 1.53** | – |", "| b | – | **40.00 (n = 1)** |"]


def test_page_begins_with_the_claims(folder: Path, tmp_path: Path) -> None:
    page = contents(folder.parent, [folder], tmp_path)
    assert page.startswith("**Claims of papers**, each by its own experiment ([report](results/rep")
    line = next(line for line in page.splitlines() if line.startswith("| c |"))
    assert line == (
        "| c | a above b in knn | +3.00 (−9.71 to +15.71) | undecided (it was not noted before its "
        "runs) |"
    )
    assert page.endswith(tables([folder], tmp_path))
    assert contents(tmp_path / "none", [folder], tmp_path) == tables([folder], tmp_path)


def test_picture_is_xml_with_every_row(folder: Path) -> None:
    drawn = ElementTree.fromstring(picture(read_results(folder)))
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a", "b"} <= set(words)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 2


def test_script_writes_and_checks(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def script(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["update_results.py", *words])
        return update_results.main()

    assert script("--check") == 0, "the page is not what the records say"
    page = tmp_path / "index.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nRest.\n")
    for name, value in (("PAGE", page), ("FOLDERS", [folder]), ("CLAIMS", tmp_path / "none")):
        monkeypatch.setattr(update_results, name, value)
    assert script("--check") == 1
    assert "not what the records say" in capsys.readouterr().err
    assert script() == 0
    table = tables([folder], tmp_path)
    assert page.read_text() == f"# Title\n\n{BEGIN}\n{table}\n{END}\n\nRest.\n"
    assert script("--check") == 0
    # One number of one record.
    write_folder(folder, settings(), rows_of({"a": [50.0, 53.0, 52.1], "b": B}))
    assert script("--check") == 1
