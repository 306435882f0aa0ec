"""``solo-ext benchmark report``: records as Markdown, without figures, and as one HTML page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Drawing

from solo_ext.core.files import write_text
from solo_ext.lab.experiments.records import SETTINGS
from solo_ext.lab.experiments.results import Place, Results, read_results
from solo_ext.lab.experiments.statistics import estimate, mean_of, verdicts
from solo_ext.lab.experiments.tables import (
    WHOSE,
    differences_table,
    environments_table,
    expectation,
    mean_and_interval,
    protocols_table,
    scores_table,
    verdict_lines,
    verdict_table,
)
from solo_ext.lab.pages import (
    Block,
    Bullets,
    Figure,
    Figures,
    Paragraph,
    Section,
    Table,
    plain_text,
    png_of,
    render_page,
)

MOST_LINES = 8
_COLOURS = dict(zip(WHOSE, ("C0", "C1", "C7", "C4"), strict=True))


def write_report(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes ``report.md`` and ``report.html``, the same numbers in each, and returns the files.

    And ``verdicts.json`` where there are hypotheses.

    Args:
        folder: written by ``solo-ext benchmark run``, or one with several such folders in it, whose
            page begins with the verdicts of all.
        out: folder of the report; null: ``folder``.

    Raises:
        UserError: the folder has no settings or records, or invalid ones.

    >>> write_report(Path("nowhere"))
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.UserError: records 'nowhere': no records.jsonl in it; give a ...
    """
    inner = [] if (folder / SETTINGS).is_file() else sorted(folder.glob(f"*/{SETTINGS}"))
    every = [read_results(file.parent) for file in inner] or [read_results(folder)]
    title, sections = every[0].settings.title, benchmark_sections(every[0])
    if inner:
        title, sections = folder.name, [Section("Claims", [claims_table(every)])]
        for results in every:
            first, *others = benchmark_sections(results)
            sections += [Section(results.settings.title, first.blocks), *others]
    place = folder if out is None else out
    place.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.md": _render_markdown(title, sections),
        "report.html": render_page(title, sections),
    }
    lines = [line for results in every for line in verdict_lines(results, verdicts(results))]
    if lines:
        texts["verdicts.json"] = json.dumps(lines, indent=1) + "\n"
    for name, text in texts.items():
        write_text(place / name, text)
    return [place / name for name in texts]


def claims_table(every: Sequence[Results]) -> Table:
    """A line for each verdict of several benchmarks.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> claims_table([example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})]).rows[0][:2]
    ['pcl is better', 'pcl above simclr in knn']
    """
    lines = [
        [
            verdict.hypothesis.claim,
            expectation(results, verdict.hypothesis),
            mean_and_interval(verdict.estimate),
            verdict.answer + (f" ({verdict.reason})" if verdict.reason else ""),
        ]
        for results in every
        for verdict in verdicts(results)
    ]
    head = ["Claim", "Expected", "Difference, 95 % interval", "Verdict"]
    return Table(head, lines, numeric=frozenset({2}))


def benchmark_sections(results: Results) -> list[Section]:
    """The content of a report; the first section has no title of its own.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})
    >>> [section.title for section in benchmark_sections(results)][:4]
    ['', 'digits', 'Scores', 'Differences to the rows compared with']
    """
    settings, places = results.settings, results.places()
    seeds = ", ".join(map(str, settings.seeds))
    rows = len({r["row"] for r in results.records})
    counts = f"{len(results.records)} runs of {rows} rows; seeds {seeds}."
    first: list[Block] = [Paragraph(text) for text in (settings.about, counts) if text]
    notes = []
    if results.left_out:
        listed = ", ".join(results.left_out)
        notes.append(
            f"Left out, as the settings do not name them or a later run is there: {listed}."
        )
    if empty := results.places(empty=True):
        notes.append(f"No runs yet: {', '.join(f'{p.dataset} ({p.budget})' for p in empty)}.")
    if notes:
        first.append(Bullets(notes))
    sections = [Section("", first)]
    for place in places:
        sections += _place_sections(results, place)
    if settings.hypotheses:
        sections.append(_hypotheses(results))
    if results.records:
        measured: list[Block] = [Paragraph(_MEASURED), protocols_table(results.records)]
        sections += [
            Section("What ran where", [environments_table(results.records)]),
            Section("How each number is measured", measured),
        ]
    return sections


_MEASURED = (
    "Scores are percent, after the last epoch, on the test split, which chooses nothing; the "
    "backbone is frozen unless the protocol says otherwise. Seconds and images/s are of training "
    "without evaluations, on machines that may have run other jobs, and compare only where machine "
    "and threads are the same. Peak memory is that of the training process. Settings that are not "
    f"named are the protocol's defaults; what each row trains is in {SETTINGS}."
)


def _place_sections(results: Results, place: Place) -> list[Section]:
    """Tables and charts of one data set and budget."""
    held = [r for row in results.rows(place) for r in results.runs(place, row).values()]
    trained = {f"{r['epochs']:,} epochs of {r['images']:,} images" for r in held if r["epochs"]}
    about = [f"Trained: {', '.join(sorted(trained)) or 'nothing'}.", *_warnings(results, place)]
    sections = [Section(results.title(place), [Bullets(about)])]

    def add(title: str, remark: str, *blocks: Block) -> None:
        sections.append(Section(title, [*blocks, Paragraph(remark, "soft")], level=3))

    add(
        "Scores",
        "Mean ± sample deviation over seeds; n: seeds with a score, where fewer than the row's. "
        "Bold: the highest mean of the rows of solo_ext and solo-learn, of those with most seeds; "
        "whether it is apart from the others, the differences say.",
        scores_table(results, place),
        Figures(_score_figures(results, place)),
    )
    table = differences_table(results, place)
    if table.rows:
        add(
            "Differences to the rows compared with",
            "Mean of the differences paired by seed and its 95 % interval by Student's t. "
            "An interval without 0 is one of many here: some of them leave out 0 by chance.",
            table,
        )
    if results.measures and (curves := _curve_figures(results, place, results.measures[0])):
        add(
            f"{results.measures[0]} while training",
            "Mean over seeds, at the epochs that every seed measured; seconds are of training "
            "alone. Broken level lines: rows that train nothing.",
            Figures(curves),
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
            "paired by seed is where it was expected. Equivalent: it is within the margin. "
            "Contradicted: it is on the other side. "
            f"Tests made: {len(found)}; where nothing differs, one in twenty of such intervals "
            "leaves out 0 by chance."
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


def _score_figures(results: Results, place: Place) -> list[Figure]:
    """For each measure, the seeds of each row with their mean and deviation."""
    figures = []
    for measure in results.measures:
        held = {
            row: list(scores.values())
            for row in results.rows(place)
            if (scores := results.scores(place, row, measure))
        }
        if not held:
            continue
        with plain_text():
            # Not wider, so that a phone shows the text at 10 pixels.
            drawing = Drawing(figsize=(4.5, 1.4 + 0.3 * len(held)), layout="constrained")
            axes = drawing.subplots()
            axes.grid(axis="x", alpha=0.3)
            for height, (row, values) in enumerate(held.items()):
                kind, found = results.kind(place, row), estimate(values)
                assert found is not None
                drawn = _COLOURS[kind]
                axes.plot(values, [height] * len(values), "o", ms=4, alpha=0.35, color=drawn)
                mean, deviation = found.mean, found.deviation
                axes.errorbar(mean, height, xerr=deviation, fmt="o", color=drawn, label=WHOSE[kind])
            axes.set_yticks(range(len(held)), [results.label(row) for row in held])
            axes.set_ylim(len(held) - 0.5, -0.5)
            axes.set_xlabel(measure)
            handles, names = axes.get_legend_handles_labels()
            by_kind = dict(zip(names, handles, strict=True))
            drawing.legend(by_kind.values(), by_kind, loc="outside upper center", ncols=2)
            figures.append(Figure(f"{measure}: mean, deviation and seeds", png_of(drawing)))
    return figures


def _curve_figures(results: Results, place: Place, measure: str) -> list[Figure]:
    """For each family of rows, the score over epochs, and over seconds of training."""
    rows = [row for row in results.rows(place) if results.curve(place, row, measure)]
    levels = {
        row: found.mean
        for row in results.rows(place)
        if results.kind(place, row) == "baseline"
        and (found := mean_of(results, place, row, measure)) is not None
    }
    figures = []
    for family in families(results, rows):
        with plain_text():
            drawing = Drawing(figsize=(4.5, 6), layout="constrained")
            both = drawing.subplots(2)
            for column, axes in enumerate(both):
                for row in family:
                    points = results.curve(place, row, measure)
                    x, y = [point[column] for point in points], [score for *_, score in points]
                    axes.plot(x, y, marker=".", label=results.label(row))
                for (row, level), dashes in zip(levels.items(), ("--", ":"), strict=False):
                    axes.axhline(level, color="grey", ls=dashes, label=results.label(row))
                axes.grid(axis="y", alpha=0.3)
                axes.set(xlabel=("epochs", "seconds of training")[column], ylabel=measure)
            drawing.legend(
                *both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
            )
            names = ", ".join(results.label(row) for row in family)
            figures.append(Figure(f"{measure}: {names}", png_of(drawing)))
    return figures


def families(results: Results, rows: Sequence[str]) -> list[list[str]]:
    """Rows that share a chart: each base with the rows compared with it, and all the others.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0], "simclr": [90.0], "byol": [89.0]})
    >>> families(results, ["pcl", "simclr", "byol"])
    [['simclr', 'pcl'], ['byol', 'pcl']]
    """
    bases = {row: [r for r in rows if row in results.settings.rows[r].bases] for row in rows}
    found = [[base, *compared] for base, compared in bases.items() if compared]
    shown = {row for family in found for row in family}
    found.append([row for row in rows if row not in shown])
    return [
        family[start : start + MOST_LINES]
        for family in found
        for start in range(0, len(family), MOST_LINES)
    ]


def _render_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as Markdown of GitHub's flavour, without its figures.

    >>> print(_render_markdown("Digits", [Section("kNN", [Bullets(["*a*", "- b"])])]))
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
    """Markdown of one table.

    >>> print(markdown_table(Table(["Row", "kNN"], [["pcl", "91.5"]], numeric=frozenset({1}))))
    | Row | kNN |
    | --- | --: |
    | pcl | 91.5 |
    """
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
