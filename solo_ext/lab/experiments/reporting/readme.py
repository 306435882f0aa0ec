"""The table of results in a README, generated from records."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from solo_ext.core.errors import UserError
from solo_ext.lab.experiments.reporting.blocks import Table
from solo_ext.lab.experiments.reporting.markdown import escaped, table
from solo_ext.lab.experiments.reporting.results import Results, read_results
from solo_ext.lab.experiments.reporting.sections import place_title
from solo_ext.lab.experiments.reporting.statistics import estimate
from solo_ext.lab.experiments.reporting.tables import best_rows
from solo_ext.lab.experiments.reporting.verdicts import verdicts
from solo_ext.lab.experiments.reporting.wording import mean_and_deviation

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
MEASURES = 2
"""How many of the headline's scores a README shows."""


def readme_table(folders: Sequence[Path], root: Path | None = None) -> str:
    """A compact table for each folder: the first two scores of every row, by data set.

    Args:
        folders: that ``solo-ext benchmark run`` wrote.
        root: of the README, that links are relative to; null: the working directory.
    """
    parts = []
    for folder in folders:
        results = read_results(folder)
        link = Path(os.path.relpath(folder.resolve(), (root or Path.cwd()).resolve()))
        parts += [
            f"**{escaped(results.settings.title)}** ([report]({link.as_posix()}/report.md))",
            table(_compact(results)),
            escaped(_remarks(results)),
        ]
    return "\n\n".join(parts)


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
            found = estimate(list(results.scores(place, row, measure).values()))
            cells.append(mean_and_deviation(found, len(results.settings.seeds)))
        lines.append([results.label(row), *cells])
    one = len(results.places()) == 1
    head = [
        "",
        *(
            measure if one else f"{place_title(results, place)}: {measure}"
            for place, measure in columns
        ),
    ]
    bold = frozenset(
        (rows.index(row), column)
        for column, (place, measure) in enumerate(columns, 1)
        for row in best_rows(results, place, measure)
    )
    return Table(head, lines, frozenset(range(1, len(head))), bold)


def _remarks(results: Results) -> str:
    names = ", ".join(place_title(results, place) for place in results.places())
    words = [
        f"{names}. Percent, mean ± deviation over seeds; n where it is not "
        f"{len(results.settings.seeds)}. Bold: the highest mean, which need not be apart from "
        "the next."
    ]
    if answers := Counter(verdict.answer for verdict in verdicts(results)):
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
        words.append(f"Claims of papers: {counts}.")
    return " ".join(words)
