"""Tables and picture of the page of results."""

from __future__ import annotations

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


def test_pages_are_what_the_records_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the documentation; with other records they are others."""
    for file, text in update_results.files().items():
        assert file.read_text() == text, f"{file}: run scripts/update_results.py"
    monkeypatch.setattr(update_results, "FOLDERS", [folder])
    assert any(not f.is_file() or f.read_text() != t for f, t in update_results.files().items())


def test_only_what_is_between_the_markers_is_written() -> None:
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nRest.\n"
    assert update_results.updated(page, "new") == page.replace("old", "new")
