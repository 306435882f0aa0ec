"""``solo-ext benchmark report``: records as Markdown and as one HTML page.

:func:`benchmark_sections` defines the content of a report. Markdown and HTML show the same
sections; Markdown has no figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from solo_ext.core.files import write_text
from solo_ext.lab.experiments.figures import curve_figures, loss_figures, score_figures
from solo_ext.lab.experiments.records import SETTINGS
from solo_ext.lab.experiments.results import Place, Results, read_results
from solo_ext.lab.experiments.statistics import verdicts
from solo_ext.lab.experiments.tables import (
    differences_table,
    environments_table,
    protocols_table,
    rows_table,
    scores_table,
    verdict_table,
)
from solo_ext.lab.pages import (
    Block,
    Bullets,
    Figures,
    Paragraph,
    Section,
    Table,
    render_page,
)


def write_report(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes ``report.md`` and ``report.html``, the same numbers in each.

    Args:
        folder: written by ``solo-ext benchmark run``.
        out: folder of the report; null: ``folder``.

    Returns:
        The two files.

    Raises:
        UserError: the folder has no settings or records.
        ConfigError: invalid settings.
    """
    results = read_results(folder)
    title, sections = results.settings.title, benchmark_sections(results)
    place = folder if out is None else out
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / "report.md", render_markdown(title, sections))
    write_text(place / "report.html", render_page(title, sections))
    return [place / "report.md", place / "report.html"]


def benchmark_sections(results: Results) -> list[Section]:
    """The content of a report; the first section has no title of its own."""
    settings = results.settings
    places = results.places()
    seeds = ", ".join(map(str, settings.seeds))
    rows = len({r["row"] for r in results.records})
    counts = f"{len(results.records)} runs of {rows} rows; seeds {seeds}."
    first: list[Block] = [Paragraph(text) for text in (settings.about, counts) if text]
    notes = list(results.left_out)
    if empty := results.places(empty=True):
        notes.append(f"No runs yet: {', '.join(f'{p.dataset} ({p.budget})' for p in empty)}.")
    if notes:
        first.append(Bullets(notes))
    sections = [Section("", first)]
    for place in places:
        sections += _place_sections(results, place)
    if settings.hypotheses:
        sections.append(_hypotheses(results))
    return sections + (_origins(results) if results.records else [])


def _place_sections(results: Results, place: Place) -> list[Section]:
    """Tables and charts of one data set and budget."""
    held = [r for row in results.rows(place) for r in results.runs(place, row).values()]
    trained = {f"{r['epochs']:,} epochs of {r['images']:,} images" for r in held if r["epochs"]}
    sections = [
        Section(
            results.title(place),
            [
                Bullets(
                    [
                        f"Trained: {', '.join(sorted(trained)) or 'nothing'}.",
                        *_warnings(results, place),
                    ]
                )
            ],
        )
    ]

    def add(title: str, remark: str, *blocks: Block) -> None:
        sections.append(Section(title, [*blocks, Paragraph(remark, "soft")], level=3))

    add(
        "Scores",
        "Mean ± sample deviation over seeds; n: seeds with a score, where fewer than the row's. "
        "Bold: the highest mean of the rows of solo_ext and solo-learn, of those with most seeds; "
        "whether it is apart from the others, the differences say.",
        scores_table(results, place),
        Figures(score_figures(results, place)),
    )
    table = differences_table(results, place)
    if table.rows:
        add(
            "Differences to the rows compared with",
            "Mean of the differences paired by seed and its 95 % interval by Student's t. "
            "An interval without 0 is one of many here: some of them leave out 0 by chance.",
            table,
        )
    if results.measures and (curves := curve_figures(results, place, results.measures[0])):
        add(
            f"{results.measures[0]} while training",
            "Mean over seeds, at the epochs that every seed measured; seconds are of training "
            "alone. Broken level lines: rows that train nothing.",
            Figures(curves),
        )
    if losses := loss_figures(results, place):
        add(
            "Loss while training",
            "Mean over seeds. Each method minimises a loss of its own, on a scale of its own: "
            "the lower of two methods' losses does not mean the better features.",
            Figures(losses),
        )
    return sections


def _warnings(results: Results, place: Place) -> list[str]:
    notes = []
    if missing := results.missing(place):
        listed = "; ".join(
            f"{results.label(row)}: seeds {', '.join(map(str, seeds))}"
            for row, seeds in missing.items()
        )
        notes.append(f"Missing runs. {listed}.")
    for row in results.rows(place):
        if keys := results.differing(place, row):
            notes.append(
                f"The seeds of {results.label(row)} ran with different settings: {', '.join(keys)}."
            )
        for base in results.settings.rows[row].bases:
            if keys := results.unlike(place, row, base):
                notes.append(
                    f"{results.label(row)} and {results.label(base)} are not of the same "
                    f"{', '.join(keys)}: their difference is not one of methods alone."
                )
    return notes


def _hypotheses(results: Results) -> Section:
    """The verdicts, the claims, and what was not tested."""
    found = verdicts(results)
    blocks: list[Block] = [
        Paragraph(
            "Written down before the runs, at the times given; one that is changed when runs of it "
            "are known stays undecided. Reproduced: the whole 95 % interval of the differences "
            "paired by seed is on the expected side. Contradicted: it is on the other side. "
            "Undecided: it holds 0, or there are fewer pairs than the hypothesis asks for. p: "
            f"paired t test, two-sided. Tests made: {len(found)}; where nothing differs, one in "
            "twenty of such intervals leaves out 0 by chance. Holm's p is adjusted for all of them."
        )
    ]
    if found:
        blocks.append(verdict_table(results, found))
    tested = {verdict.name for verdict in found}
    claims = []
    for name, hypothesis in results.settings.hypotheses.items():
        untested = "" if name in tested else " Not tested: no runs of both rows."
        note = f" Note: {hypothesis.note}" if hypothesis.note else ""
        claim = hypothesis.claim.rstrip(".")
        since = f" Written {results.written[name]}." if name in results.written else ""
        claims.append(f"{name}: {claim}. {hypothesis.source}.{since}{untested}{note}")
    return Section("Hypotheses", [*blocks, Bullets(claims)])


def _origins(results: Results) -> list[Section]:
    """Where the runs were done, and how each number was measured."""
    measured = (
        "Scores are percent, after the last epoch, on the test split, which chooses nothing; "
        "the backbone is frozen unless the protocol says otherwise. Seconds and images/s are "
        "of training without evaluations, on machines that may have run other jobs, and compare "
        "only where machine and threads are the same. Peak memory is that of the training process. "
        "Settings that are not named are the protocol's defaults."
    )
    return [
        Section("What ran where", [environments_table(results.records)]),
        Section(
            "How each number is measured",
            [Paragraph(measured), protocols_table(results.records)],
        ),
        Section(
            "What each row trains",
            [rows_table(results), Paragraph(f"What all rows share is in {SETTINGS}.", "soft")],
            level=3,
        ),
    ]


def render_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as Markdown of GitHub's flavour, without its figures.

    >>> print(render_markdown("Digits", [Section("kNN", [Bullets(["*a*", "- b"])])]))
    # Digits
    <BLANKLINE>
    ## kNN
    <BLANKLINE>
    - \\*a\\*
    - \\- b
    <BLANKLINE>
    """
    parts = [f"# {escaped(title)}"]
    for section in sections:
        if section.title:
            parts.append(f"{'#' * section.level} {escaped(section.title)}")
        parts += filter(None, map(_markdown, section.blocks))
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Paragraph(text):
            return _as_paragraph(text)
        case Bullets(items):
            return "\n".join(f"- {_as_paragraph(item)}" for item in items)
        case Table():
            return markdown_table(block)
    # Figures are in the page alone.
    return ""


def markdown_table(table: Table) -> str:
    """Markdown of one table."""
    rule = ["--:" if column in table.numeric else "---" for column in range(len(table.head))]
    lines = [[escaped(name) for name in table.head], rule]
    for number, row in enumerate(table.rows):
        marks = ["**" if (number, column) in table.bold else "" for column in range(len(row))]
        lines.append([f"{m}{escaped(cell)}{m}" for m, cell in zip(marks, row, strict=True)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Escapes text so that Markdown shows it unchanged, on one line.

    >>> print(escaped("a_b is *not* <b>"))
    a_b is \\*not\\* &lt;b&gt;
    """
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", lambda found: "\\" + found[0], plain)


def _as_paragraph(text: str) -> str:
    """Escapes a beginning that would turn the text into a list or a heading."""
    return re.sub(r"^(\d*)([-+#.)])", r"\1\\\2", escaped(text))
