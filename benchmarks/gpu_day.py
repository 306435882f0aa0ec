"""``python -m benchmarks.gpu_day OUT``: what ``scripts/gpu_day.sh`` recorded, as one page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.speed.record import HEADER, cells
from benchmarks.speed.target import Finding
from solo_ext.core.files import read_jsonl, read_text, write_text
from solo_ext.lab.experiments.report import benchmark_sections
from solo_ext.lab.experiments.results import read_results
from solo_ext.lab.pages import Block, Bullets, Paragraph, Section, Table, render_page

PAGE = "page.html"


def write_page(out: Path) -> Path:
    """Writes the page; a part without a record has a section that says so."""
    parts = read_text(out / "parts.txt").splitlines()
    sections = [
        Section("Parts", [Bullets(parts)]),
        _section("Tests marked gpu", out / "tests.xml", _tests),
        _section("Files to crops", out / "images.jsonl", _images),
        _section("E-step on made features", out / "e_step.jsonl", _e_step),
        _section("Speed", out / "speed.jsonl", _speed),
    ]
    if (out / "training" / "records.jsonl").is_file():
        first, *others = benchmark_sections(read_results(out / "training"))
        sections += [Section("Training", first.blocks), *others]
    else:
        sections.append(Section("Training", [Paragraph("No record.", "wrong")]))
    write_text(out / PAGE, render_page("A day with a GPU", sections))
    return out / PAGE


def _section(title: str, record: Path, blocks: Callable[[Path], Sequence[Block]]) -> Section:
    there = record.is_file()
    return Section(title, blocks(record) if there else [Paragraph("No record.", "wrong")])


def _tests(record: Path) -> list[Block]:
    cases = list(ElementTree.fromstring(read_text(record)).iter("testcase"))
    wrong = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    passed = len(cases) - len(wrong) - skipped
    counts = f"{passed} passed, {len(wrong)} failed, {skipped} skipped."
    names = [f"failed: {c.get('classname')}::{c.get('name')}" for c in wrong]
    return [Paragraph(counts), *([Bullets(names)] if names else [])]


def _images(record: Path) -> list[Block]:
    about, lines = _last(record)
    head = ["Source", "Pixels", "Augmentation", "Images/s", "Times the first"]
    rows = [
        [
            line["source"],
            str(line["size"]),
            line["augmentation"],
            f"{line['images_per_second']:,.0f}",
            f"{line['speed_ratio']:.2f}",
        ]
        for line in lines
    ]
    numeric = frozenset({1, 3, 4})
    return [_where(about), Table(head, rows, numeric=numeric)]


def _e_step(record: Path) -> list[Block]:
    about, lines = _last(record)
    sizes = " + ".join(f"{count:,}" for count in about["clusters"])
    text = f"{about['rows']:,} x 128 into {sizes} clusters, by {about['backend']}."
    head = ["Processes", "Cold, seconds", "Warm, seconds", "Peak of the GPU's memory, GiB"]
    rows = [[str(n.get(k, "")) for k in ("ranks", "cold", "warm", "peak_gib")] for n in lines]
    return [Paragraph(text), _where(about), Table(head, rows, numeric=frozenset(range(4)))]


def _speed(record: Path) -> list[Block]:
    about, *lines = read_jsonl(record)
    verdicts = about["effort"]["shrink"] == 1
    found = [cells(Finding.from_json(f), verdicts) for line in lines for f in line["findings"]]
    return [_where(about), Table(HEADER, found)]


def _last(record: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the last call added: a line on how and where, and what was measured."""
    lines = read_jsonl(record)
    start = max(number for number, line in enumerate(lines) if "environment" in line)
    return lines[start], lines[start + 1 :]


def _where(about: dict[str, Any]) -> Paragraph:
    found = about["environment"]
    devices = ", ".join(found["gpus"]) or f"no GPU; {found['processor']}"
    return Paragraph(
        f"{devices}; torch {found['packages']['torch']}, CUDA {found['cuda']}.", "soft"
    )


if __name__ == "__main__":
    print(write_page(Path(sys.argv[1])))
