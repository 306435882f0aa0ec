"""The report in its two forms."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from solo_ext.lab.experiments import report
from solo_ext.lab.experiments.records import SETTINGS, note_hypotheses
from solo_ext.lab.experiments.report import _families, benchmark_sections, write_report
from solo_ext.lab.experiments.results import Results
from solo_ext.lab.pages import Bullets, Paragraph, Section, Table
from tests.lab.experiments.report_records import (
    ENVIRONMENT,
    record,
    results,
    rows_of,
    settings,
    write_folder,
)
from tests.page_tree import parse

A, B = [50.0, 53.0, 52.0], [48.0, 49.0, 51.0]
HOSTILE = "<script>alert('1')</script>|`x`\n*y*"
CELL = re.compile(r"(?<!\\)\|")


DRAWN = ("test_files_say_the_same", "test_nothing_is_nan_whatever_the_curves")
"""Tests whose charts are drawn; those of the others, which say nothing of them, are a pixel."""


@pytest.fixture(autouse=True)
def _pixels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.originalname not in DRAWN:
        file = io.BytesIO()
        Image.new("RGB", (1, 1)).save(file, "PNG")
        monkeypatch.setattr(report, "png_of", lambda _: file.getvalue())


def section(found: Results, heading: str) -> Section:
    (one,) = (s for s in benchmark_sections(found) if s.title == heading)
    return one


def table(found: Results, heading: str) -> Table:
    return next(block for block in section(found, heading).blocks if isinstance(block, Table))


def by_row(found: Results, heading: str) -> dict[str, dict[str, str]]:
    shown = table(found, heading)
    return {line[0]: dict(zip(shown.head, line, strict=True)) for line in shown.rows}


def said(found: Results) -> str:
    """All words outside tables."""
    words: list[str] = []
    for section in benchmark_sections(found):
        words.append(section.title)
        for block in section.blocks:
            if isinstance(block, Bullets):
                words += block.items
            elif isinstance(block, Paragraph):
                words.append(block.text)
    return "\n".join(words)


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Rows of cells of every table, which must all be as long as the head of theirs."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        assert line.endswith("|")
        cells = [cell.strip() for cell in CELL.split(line)[1:-1]]
        if not inside:
            found.append([])
        inside = True
        found[-1].append(cells)
    for table in found:
        assert len({len(row) for row in table}) == 1, table
        assert all(set(cell) <= {"-", ":"} for cell in table[1])
    return found


def written(folder: Path, records: list[Any], **given: Any) -> list[str]:
    """Markdown and HTML."""
    return [f.read_text() for f in write_report(write_folder(folder, settings(**given), records))]


def test_scores_have_known_answers() -> None:
    found = results({"a": A, "b": B, "pixels": [60.0]})
    lines = by_row(found, "Scores")
    assert list(lines) == ["a", "b", "pixels"]
    assert lines["a"]["knn"] == "51.67 ± 1.53"
    assert lines["a"]["linear"] == "61.67 ± 1.53"
    assert (lines["a"]["Seeds"], lines["pixels"]["Seeds"]) == ("3", "1")
    assert (lines["a"]["Seconds"], lines["a"]["Images/s"]) == ("62", "1,000")
    assert lines["a"]["Peak memory"] == "1.00 GiB"
    assert [lines["pixels"][k] for k in ("Seconds", "Images/s", "Peak memory")] == ["–"] * 3
    # Higher, but of nothing that was trained.
    assert table(found, "Scores").bold == {(0, 3), (0, 4)}
    assert table(results({"a": [70.0], "b": B}), "Scores").bold == {(1, 3), (1, 4)}
    line = by_row(found, "How each number is measured")
    assert [line[name]["Settings"] for name in ("knn", "linear")] == ["defaults", "holdout 0.2"]
    assert line["knn"]["Runs"] == "7"


def test_differences_have_known_answers() -> None:
    (line,) = table(
        results({"a": [50.0], "b": [48.0]}), "Differences to the rows compared with"
    ).rows
    assert line == ["a minus b", "1", "+2.00", "+2.00"]
    (line,) = table(results({"a": A, "b": B}), "Differences to the rows compared with").rows
    # 2, 4, 1: mean 7/3, deviation 1.5275, t(0.975, 2) = 4.3027.
    assert line == ["a minus b", "3", *["+2.33 (−1.46 to +6.13)"] * 2]


def test_a_score_that_a_seed_lacks_shows_its_count() -> None:
    half = record("a", 3, 52.0, scores={"linear": 62.0})
    found = Results(settings(), [*rows_of({"a": A[:2], "b": B}), half])
    assert by_row(found, "Scores")["a"]["knn"] == "51.50 ± 2.12 (n = 2)"
    assert by_row(found, "Scores")["a"]["linear"] == "61.67 ± 1.53"
    line = table(found, "Differences to the rows compared with").rows[0]
    assert line[1] == "3"
    assert line[2].endswith("(n = 2)")


def test_missing_runs_are_listed_and_counted() -> None:
    found = results({"a": A[:2], "b": B})
    assert by_row(found, "Scores")["a"]["Seeds"] == "2 of 3"
    assert "Missing runs. a: seeds 3; pixels: seeds 1, 2, 3." in said(found)
    found = Results(settings(), [])
    assert "No runs yet: digits (default)." in said(found)
    assert not any(isinstance(b, Table) for s in benchmark_sections(found) for b in s.blocks)


def test_every_environment_is_listed_with_its_runs() -> None:
    gpu = {**ENVIRONMENT, "gpus": ["NVIDIA H200"], "cuda": "12.8"}
    records = rows_of({"a": A, "b": B})
    records[0]["environment"] = gpu
    records[1]["threads"] = 2
    records[3]["environment"] = {
        **ENVIRONMENT,
        "host": {**ENVIRONMENT["host"], "patches": ["momentum-update"]},
    }
    records[2]["code"] = {"version": "0.1.0", "commit": "0" * 40, "changed": True}
    records[0]["config"] = {**records[0]["config"], "max_epochs": 8}
    found = Results(settings(), records)
    lines = table(found, "What ran where").rows
    assert sorted(line[0] for line in lines) == ["1", "1", "1", "1", "2"]
    text = "\n".join(" ".join(line) for line in lines)
    for part in (
        "NVIDIA H200",
        "CUDA 12.8",
        "patches: momentum-update",
        "a processor, 2 cores, no GPU",
        "abcdef012345",
    ):
        assert part in text
    assert "0.1.0, 000000000000, uncommitted changes, or resumed with other code" in text
    assert "torch 2.15.0" in text
    assert "timm None" not in text
    assert "The seeds of a ran with different settings: max_epochs." in said(found)


def test_hypotheses_are_told_with_verdicts_and_notes() -> None:
    both = {
        "better": {"row": "a", "base": "b", "seeds": 3, "note": "Noise."},
        "untested": {"row": "a", "base": "pixels"},
    }
    common = {"claim": "A claim.", "source": "A paper", "measure": "knn"}
    found = results(
        {"a": [59.0, 61.1, 62.0], "b": B}, hypotheses={k: common | v for k, v in both.items()}
    )
    line = by_row(found, "Hypotheses")["better"]
    assert line["Verdict"] == "reproduced"
    assert line["Expected"] == "a above b in knn"
    text = said(found)
    since = "Written 2026-03-01T00:00:00+00:00."
    assert f"better: A claim. A paper. {since} Note: Noise." in text
    assert (
        f"untested: A claim. A paper. {since} Not tested: no pair of runs has this score." in text
    )
    assert "Tests made: 1;" in text


def test_verdicts_of_several_experiments_are_one_page_and_one_file(tmp_path: Path) -> None:
    claim = {"source": "A paper", "row": "a", "base": "b", "measure": "knn", "seeds": 3}
    for name, scores, given in (
        ("e1", [59.0, 61.1, 62.0], {"claim": "More.", "expected": "+1 to +20", "isolates": []}),
        ("e2", B, {"claim": "Alike.", "direction": "equal", "margin": 0.5}),
    ):
        made = settings(title=name, hypotheses={"h": claim | given})
        later = rows_of({"a": scores, "b": B}, finished="2999-03-02T10:00:00+00:00")
        write_folder(tmp_path / "claims" / name, made, later)
        note_hypotheses(made, tmp_path / "claims" / name)
    text, _, verdicts = [f.read_text() for f in write_report(tmp_path / "claims")]
    table = markdown_tables(text)[0]
    assert table[0] == ["Claim", "Expected", "Difference, 95 % interval", "Verdict"]
    assert [line[3] for line in table[2:]] == ["reproduced", "equivalent"]
    assert table[2][1] == "a above b in knn: +1 to +20"
    assert table[3][1] == "a within 0.5 of b in knn"
    begun = tmp_path / "claims" / "e3" / SETTINGS
    begun.parent.mkdir()
    begun.write_text((tmp_path / "claims" / "e2" / SETTINGS).read_text())
    text, _, _ = [f.read_text() for f in write_report(tmp_path / "claims")]
    assert text.count("No runs yet") == 1, "one that has just begun hides no other"
    first, second = json.loads(verdicts)
    assert (first["claim"], first["experiment"], first["pairs"]) == ("More.", "e1", 3)
    assert first["low"] < first["difference"] < first["high"]
    assert (first["isolates"], second["verdict"], second["difference"]) == ([], "equivalent", 0)
    assert [line.removeprefix("## ") for line in text.splitlines() if line[:3] == "## "][:2] == [
        "Claims",
        "e1",
    ]


def test_files_say_the_same(tmp_path: Path) -> None:
    records = rows_of({"a": A, "b": B, "pixels": [60.0]})
    text, html = written(tmp_path, records)
    assert {f.name for f in tmp_path.glob("report.*")} == {"report.md", "report.html"}
    page = parse(html)
    in_markdown = markdown_tables(text)
    in_page = [
        [[cell.text for cell in line.all("th") + line.all("td")] for line in shown.all("tr")]
        for shown in page.all("table")
    ]
    assert len(in_markdown) == len(in_page) == 4
    # Two measures, and the curves of both rows.
    assert len(page.all("img")) == 3
    for left, right in zip(in_markdown, in_page, strict=True):
        plain = [[re.sub(r"\\(.)", r"\1", c).replace("**", "") for c in row] for row in left]
        assert [plain[0], *plain[2:]] == right
    assert "**51.67 ± 1.53**" in text
    assert {b.text for b in page.all("b")} == {"51.67 ± 1.53", "61.67 ± 1.53"}
    assert [h.text for h in page.all("h1")] == ["A benchmark"]


def test_what_comes_from_records_is_escaped(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "packages": {HOSTILE: HOSTILE}, "processor": HOSTILE}
    records = rows_of({"a": A, "b": B}, environment=environment)
    for line in records:
        line["scores"] |= {HOSTILE: 1.0}
        line["evaluation"] = {HOSTILE: {HOSTILE: HOSTILE}}
        assert line["curves"] is not None
        line["curves"]["scores"] = {HOSTILE: [1.0, 2.0, 3.0]}
    claim = {"claim": HOSTILE, "source": HOSTILE, "note": HOSTILE, "measure": HOSTILE}
    markdown, html, _ = written(
        tmp_path,
        records,
        title=HOSTILE,
        about=HOSTILE,
        rows={
            "a": {"config": HOSTILE, "label": HOSTILE, "bases": ["b"]},
            "b": {"config": HOSTILE, "changes": [HOSTILE]},
        },
        headline=[HOSTILE],
        evaluation={HOSTILE: None},
        hypotheses={"h": {**claim, "row": "a", "base": "b"}},
    )
    page = parse(html)
    assert page.all("script") == []
    assert html.count("alert") > 15
    assert "<script" not in html
    assert "<script" not in markdown
    assert "`x`" not in markdown.replace("\\`", "")
    assert len(markdown_tables(markdown)) == len(page.all("table"))


@pytest.mark.parametrize(
    ("epochs", "knn"), [([], None), ([0, 1], [None, None]), ([0], [50.0]), ([0, 1], [50.0, 50.0])]
)
def test_nothing_is_nan_whatever_the_curves(
    tmp_path: Path, epochs: list[int], knn: list[float | None] | None
) -> None:
    records = rows_of({"a": [50.0] * 3, "b": [50.0] * 3, "pixels": [50.0]})
    for line in records[1:6]:
        scores = {} if knn is None else {"knn": knn}
        line["curves"] = {"epochs": epochs, "seconds": [0.0] * len(epochs), "scores": scores}
    records[0]["curves"] = None
    files = written(tmp_path, records)
    titles = [h.text for h in parse(files[1]).all("h3")]
    assert ("knn while training" in titles) == (50.0 in (knn or ()))
    assert not any(re.search(r"\bnan\b|\binf\b", text, re.IGNORECASE) for text in files)


def grouped(**bases: list[str]) -> list[list[str]]:
    rows: dict[str, Any] = {name: {"config": name, "bases": named} for name, named in bases.items()}
    return _families(results({}, rows=rows), list(rows))


def test_rows_share_a_chart_with_what_they_are_compared_with() -> None:
    assert grouped(a=["b"], b=[], c=["b"], d=[]) == [["b", "a", "c"], ["d"]]
    found = grouped(x=[], **{f"a{i}": ["x"] for i in range(10)})
    assert [len(family) for family in found] == [8, 3]
    assert [len(family) for family in grouped(**{f"a{i}": [] for i in range(10)})] == [8, 2]
