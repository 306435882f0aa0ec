"""Writes the tables of docs/benchmarks/index.md and its picture from records.

python scripts/update_results.py    # from results/claims, digits and cifar10-cpu
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from solo_ext.core.files import write_text
from solo_ext.lab.experiments.records import SETTINGS
from solo_ext.lab.experiments.report import claims_remark, claims_table, mean_and_deviation
from solo_ext.lab.experiments.results import Results, read_results
from solo_ext.lab.experiments.verdicts import verdicts
from solo_ext.lab.pages import Table, escaped, markdown_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "index.md"
FOLDERS = [ROOT / "results" / name for name in ("digits", "cifar10-cpu")]
CLAIMS = ROOT / "results" / "claims"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
MEASURES = 2
"""How many of the headline's scores the page shows."""


def files() -> dict[Path, str]:
    """What the records say."""
    return {
        PAGE: updated(PAGE.read_text(), contents(CLAIMS, FOLDERS, PAGE.parent)),
        PAGE.parent / f"{FOLDERS[0].name}.svg": picture(read_results(FOLDERS[0])),
    }


def updated(page: str, content: str) -> str:
    """The page with other content between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name}: needs one line {BEGIN!r}, and one {END!r} after it"
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def contents(experiments: Path, folders: Sequence[Path], root: Path) -> str:
    """The verdicts of all experiments in a folder, where there are any, before the tables."""
    results = [read_results(file.parent) for file in sorted(experiments.glob(f"*/{SETTINGS}"))]
    if not results:
        return tables(folders, root)
    link = Path(os.path.relpath(experiments.resolve(), root.resolve())).as_posix()
    head = f"**Claims of papers**, each by its own experiment ([report]({link}/report.md))"
    claims = markdown_table(claims_table(results))
    return "\n\n".join([head, claims, claims_remark(results), tables(folders, root)])


def tables(folders: Sequence[Path], root: Path) -> str:
    """A compact table for each folder: the first two scores of every row, by data set.

    Args:
        folders: that ``solo-ext benchmark run`` wrote.
        root: folder of the page, that links are relative to.
    """
    parts = []
    for folder in folders:
        results = read_results(folder)
        link = Path(os.path.relpath(folder.resolve(), root.resolve()))
        parts += [
            f"**{escaped(results.settings.title)}** ([report]({link.as_posix()}/report.md))",
            markdown_table(_compact(results)),
            escaped(_remarks(results)),
        ]
    return "\n\n".join(parts)


def _compact(results: Results) -> Table:
    columns = [
        (place, measure)
        for place in results.places()
        for measure in results.measures[:MEASURES]
        if any(results.scores(place, row, measure) for row in results.rows(place))
    ]
    rows = [
        row
        for row in results.settings.rows
        if any(results.runs(place, row) for place, _ in columns)
    ]
    lines = []
    for row in rows:
        cells = []
        for place, measure in columns:
            found = results.mean(place, row, measure)
            cells.append(mean_and_deviation(found, len(results.settings.seeds)))
        lines.append([results.label(row), *cells])
    one = len(results.places()) == 1
    head = [
        "",
        *(measure if one else f"{results.title(place)}: {measure}" for place, measure in columns),
    ]
    bold = frozenset(
        (rows.index(row), column)
        for column, (place, measure) in enumerate(columns, 1)
        for row in results.best(place, measure)
    )
    return Table(head, lines, frozenset(range(1, len(head))), bold)


def _remarks(results: Results) -> str:
    names = ", ".join(results.title(place) for place in results.places())
    words = [
        f"{names}. Percent, mean ± deviation over seeds; n where it is not "
        f"{len(results.settings.seeds)}. Bold: the highest mean, which need not be apart from "
        "the next."
    ]
    if answers := Counter(verdict.answer for verdict in verdicts(results)):
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
        words.append(f"Claims of papers: {counts}.")
    return " ".join(words)


ROW, LEFT, WIDTH = 20, 250, 760
"""Pixels of the picture: height of a row, width of its labels, width in all."""
OURS, OTHERS = "#c2410c", "#37474f"


def picture(results: Results) -> str:
    """A dot and a line of one deviation to each side for every row's first score, as SVG."""
    place, measure = results.places()[0], results.measures[0]
    means = {row: results.mean(place, row, measure) for row in results.rows(place)}
    found = {row: mean for row, mean in means.items() if mean is not None}
    rows = sorted(found, key=lambda row: -found[row].mean)
    low, high = 5 * math.floor(min(x.mean - (x.deviation or 0) for x in found.values()) / 5), 100
    height = ROW * len(rows) + 60

    def across(score: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 30) * (score - low) / (high - low):.1f}"

    title = f"{results.title(place)}: {measure} accuracy in percent, mean and deviation over seeds"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#f5f6fa"/>',
        f'<text x="{LEFT}" y="22" fill="#37474f">{escape(title)}</text>',
    ]
    for score in range(low, high + 1, 5):
        x = across(score)
        lines += [
            f'<line x1="{x}" y1="32" x2="{x}" y2="{height - 24}" stroke="#dfe2ec"/>',
            f'<text x="{x}" y="{height - 8}" fill="#37474f" text-anchor="middle">{score}</text>',
        ]
    for number, row in enumerate(rows):
        y, score = 46 + ROW * number, found[row]
        color = OURS if results.kind(place, row) == "plugin" else OTHERS
        name = escape(results.label(row))
        lines.append(
            f'<text x="{LEFT - 12}" y="{y + 4}" fill="{color}" text-anchor="end">{name}</text>'
        )
        if score.deviation:
            left, right = (across(score.mean + sign * score.deviation) for sign in (-1, 1))
            lines.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="{color}"/>')
        lines.append(f'<circle cx="{across(score.mean)}" cy="{y}" r="4" fill="{color}"/>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    for file, text in files().items():
        write_text(file, text)
