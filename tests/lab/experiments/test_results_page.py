"""Tables and picture of the page of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts import update_results
from scripts.update_results import (
    BEGIN,
    END,
    contents,
    correlation,
    distillation_section,
    first_place,
    goodness,
    label_free_table,
    picture,
    published,
    slots_table,
    tables,
)
from solo_ext.lab.experiments.results import Results, read_results
from tests.lab.experiments.report_records import record, rows_of, settings, write_folder

BOTH = "+1.50 (−4.85 to +7.85), b"
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
        "digits. Accuracies are in percent, mean ± deviation over seeds. n is the number of seeds "
        "if it is not 3. The highest mean is bold. Look at the deviations before you rank methods. "
        "Claims of papers: 1 undecided."
    )


def test_data_sets_are_columns(tmp_path: Path) -> None:
    made = settings(datasets={"digits": [], "cifar10": []}, headline=["knn"])
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
    results = read_results(folder)
    drawn = ElementTree.fromstring(picture(results, results.places()[0]))
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a", "b"} <= set(words)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 2


def test_pages_are_what_the_records_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the documentation; with other records they are others."""
    for file, text in update_results.files().items():
        assert file.read_text() == text, f"{file}: run scripts/update_results.py"
    monkeypatch.setattr(update_results, "FOLDERS", [folder])
    assert any(not f.is_file() or f.read_text() != t for f, t in update_results.files().items())


def staged(tmp_path: Path, seeds: Sequence[int]) -> Results:
    """Stage a, of rows a and b, whose run of seed 2 may be missing; stage b has no run."""
    made = settings(
        budgets={"short": ["max_epochs=4"], "long": ["max_epochs=8"]},
        stages={
            "a": {"budget": "short", "rows": ["a", "b"], "seeds": [1, 2]},
            "b": {"budget": "long", "rows": ["a"], "seeds": [1]},
            "c": {"budget": "long", "rows": ["b"], "seeds": [1], "near": 1.0},
        },
        headline=["linear", "knn", "knn_200"],
    )
    found = [record(row, n, 50.0 + n * (row == "a"), budget="short") for row in "ab" for n in seeds]
    return read_results(write_folder(tmp_path, made, found))


def test_the_table_of_slots(tmp_path: Path) -> None:
    """What was measured, what is missing, and what others report beside it."""
    anchor = {"registered": "b", "library": "lightly", "epochs": "200", "knn_top1": "84.7"}
    anchor |= {"time_min": "98", "peak_gpu_gb": "1.5", "hardware": "1x GPU", "linear_top1": ""}
    table = slots_table(staged(tmp_path, [1, 2]), [anchor])
    cost = "1.0 min"
    assert table.rows == [
        ["a", "4 (short), 2 seeds", "61.50 ± 0.71", "51.50 ± 0.71", "–", BOTH, cost],
        ["a", "8 (long)", "missing", "–", "–", "–", "–"],
        ["b", "4 (short), 2 seeds", "60.00 ± 0.00", "50.00 ± 0.00", "–", "–", cost],
        ["b, reported by lightly", "200", "–", "–", "84.7", "–", "98 min, 1.5 GB, GPU"],
    ]
    assert table.bold == {(0, 2), (0, 3)}


def test_the_first_stage_has_to_be_whole(tmp_path: Path) -> None:
    assert first_place(staged(tmp_path / "whole", [1, 2])) == ("digits", "short")
    part = staged(tmp_path / "part", [1])
    assert first_place(part) is None
    assert slots_table(part, []).bold == frozenset()


def test_published_anchors() -> None:
    found = {(r["library"], r["registered"]): r for r in published()}
    assert found["lightly", "simclr"]["knn_top1"] == "84.7"
    assert found["solo-learn", "nnclr"]["linear_top1"] == "91.88"


def test_only_what_is_between_the_markers_is_written() -> None:
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nRest.\n"
    assert update_results.updated(page, "new") == page.replace("old", "new")


def test_rank_correlations() -> None:
    """Of ranks, with an interval of the runs that were drawn again."""
    linear = [40.0, 45.0, 47.0, 52.0]
    assert correlation([1.0, 10.0, 11.0, 900.0], linear) == "1.00 (1.00 to 1.00)"
    assert correlation([4.0, 3.0, 2.0, 1.0], linear) == "-1.00 (-1.00 to -1.00)"
    # Spearman's 1 - 6 sum d^2 / (n (n^2 - 1)) for one exchanged pair of neighbours.
    swapped = correlation([1.0, 3.0, 2.0, 4.0], linear)
    assert swapped.startswith("0.80 (")
    assert not swapped.startswith("0.80 (0.80")


def test_what_a_measure_prefers() -> None:
    assert goodness("views_alignment")(0.2) > goodness("views_alignment")(0.9)
    assert goodness("views_alpha_req")(1.1) > goodness("views_alpha_req")(0.7)
    assert goodness("views_lidar")(9) > goodness("views_lidar")(3)


def test_the_table_of_measures_without_labels(tmp_path: Path) -> None:
    """Runs of one config are a column, and unchanged rows are one more."""
    rows = {name: {"config": name} for name in ("simclr", "byol", "pcl")}
    rows |= {f"simclr.{n}": {"config": "simclr", "changes": [f"seed={n}"]} for n in (1, 2)}
    made = settings(
        rows=rows,
        seeds=[1],
        evaluation={"linear": None, "views": None},
        headline=["linear", "views_lidar", "views_alignment"],
    )
    values = {"simclr": (50, 3, 1), "simclr.1": (40, 2, 2), "simclr.2": (45, 4, 3)}
    values |= {"byol": (30, 1, 0), "pcl": (60, 9, 2)}
    names = ("linear", "views_lidar", "views_alignment")
    found = [
        record(row, 1, scores=dict(zip(names, numbers, strict=True)))
        for row, numbers in values.items()
    ]
    table = label_free_table(read_results(write_folder(tmp_path, made, found)))
    assert table.head == ["", "simclr (3)", "methods (3)", "lost"]
    lidar, alignment = table.rows
    assert lidar[0] == "lidar"
    assert lidar[1].startswith("0.50 (")
    assert lidar[2].startswith("1.00 (")
    # lidar's favourite has 45 where the best has 50; that of alignment is the best.
    assert lidar[3] == "5.0, 5.0"
    assert alignment[1].startswith("0.50 (")
    assert alignment[2].startswith("-1.00 (")
    assert alignment[3] == "0.0, 0.0"


def test_one_run_of_each_method_is_no_column(tmp_path: Path) -> None:
    """Records of one method's settings are compared within it alone."""
    rows: dict[str, Any] = {"pcl": {"config": "pcl"}}
    rows |= {f"pcl.{n}": {"config": "pcl", "changes": [f"seed={n}"]} for n in (1, 2)}
    names = ("linear", "clusters_silhouette_100")
    made = settings(
        rows=rows, seeds=[1], evaluation={"linear": None, "clusters": None}, headline=list(names)
    )
    found = [
        record(row, 1, scores=dict(zip(names, numbers, strict=True)))
        for row, numbers in {"pcl": (50, 3), "pcl.1": (40, 9), "pcl.2": (45, 4)}.items()
    ]
    table = label_free_table(read_results(write_folder(tmp_path, made, found)))
    assert table.head == ["", "pcl (3)", "lost"]
    assert table.rows[0][0] == "silhouette_100"
    assert table.rows[0][1].startswith("-1.00 (")
    assert table.rows[0][2] == "10.0, 10.0"


def test_the_table_of_distillation(tmp_path: Path) -> None:
    """Ours and the peer's record, line by line."""
    made = settings(seeds=[1], headline=["linear", "knn"])
    write_folder(tmp_path, made, [record("a", 1, 40.0), record("b", 1, 30.0)])
    peer = {"version": "1.2", "seconds": 90, "scores": {"linear": 44.04, "knn": 33.3}}
    (tmp_path / "peer.jsonl").write_text(json.dumps(peer) + "\n")
    lines = distillation_section(tmp_path).splitlines()
    assert lines[0] == "|  | Linear | kNN, k 20 | minutes |"
    assert lines[2:] == [
        "| a | 50.0 | 40.0 | 1.0 |",
        "| b | 40.0 | 30.0 | 1.0 |",
        "| lightly-train 1.2 | 44.0 | 33.3 | 1.5 |",
    ]
