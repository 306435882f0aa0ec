"""Writes the table of results of README.md from records.

python scripts/update_readme.py            # results/cifar10-cpu and results/digits
python scripts/update_readme.py FOLDER...  # these
python scripts/update_readme.py --check    # fails when README.md is not what the records say
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from solo_ext.core.errors import UserError
from solo_ext.core.files import write_text
from solo_ext.lab.experiments.report import escaped, markdown_table
from solo_ext.lab.experiments.results import Results, read_results
from solo_ext.lab.experiments.statistics import mean_of, verdicts
from solo_ext.lab.experiments.tables import mean_and_deviation
from solo_ext.lab.pages import Table

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / "results" / name for name in ("cifar10-cpu", "digits")]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
MEASURES = 2
"""How many of the headline's scores a README shows."""


def main() -> int:
    """Writes or compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", default=FOLDERS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        text = args.readme.read_text()
        wanted = updated(text, readme_table(args.folders, args.readme.parent))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if text == wanted:
        return 0
    if args.check:
        print(
            f"{args.readme}: not what the records say; run {Path(__file__).name}", file=sys.stderr
        )
        return 1
    write_text(args.readme, wanted)
    return 0


def updated(readme: str, content: str) -> str:
    """The README with other content between its markers.

    Raises:
        UserError: the markers are not there once each, or not in their order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise UserError(f"README: needs one line {BEGIN!r}, and one {END!r} after it")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def readme_table(folders: Sequence[Path], root: Path) -> str:
    """A compact table for each folder: the first two scores of every row, by data set.

    Args:
        folders: that ``solo-ext benchmark run`` wrote.
        root: of the README, that links are relative to.
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
            found = mean_of(results, place, row, measure)
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


if __name__ == "__main__":
    sys.exit(main())
