"""``solo-ext benchmark report``: records as Markdown, CSV and one HTML page.

:func:`benchmark_sections` defines the content of a report. Markdown and HTML show the same
sections; Markdown uses ``report.md.jinja`` and has no figures.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from solo_ext.core.errors import UserError
from solo_ext.core.files import write_text
from solo_ext.lab.experiments.figures import curve_figures, loss_figures, score_figures
from solo_ext.lab.experiments.results import Place, Results, read_results
from solo_ext.lab.experiments.statistics import common_seeds, estimate
from solo_ext.lab.experiments.tables import (
    best_rows,
    changes_table,
    counted,
    difference,
    differences_table,
    environments_table,
    hardware,
    place_ranks,
    protocols_table,
    published_numbers,
    published_table,
    rows_table,
    scores_table,
    verdict_table,
)
from solo_ext.lab.experiments.verdicts import verdicts
from solo_ext.lab.pages import (
    Block,
    Bullets,
    Figures,
    Folded,
    Paragraph,
    Section,
    Table,
    render_page,
)

_SEVERAL = "Accuracy benchmarks"


def write_report(folders: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Writes ``report.md``, ``report.csv`` and ``report.html``, the same numbers in each.

    Args:
        folders: written by ``solo-ext benchmark run``; each becomes a part of the report.
        out: folder of the report; null: the first of ``folders``.

    Returns:
        The three files.

    Raises:
        UserError: no folder is given, or one has no settings or records.
        ConfigError: invalid settings.
    """
    if not folders:
        raise UserError("report: no folder; name those that `solo-ext benchmark run` wrote")
    found = [(folder.resolve().name, read_results(folder)) for folder in folders]
    if len(found) == 1:
        title = found[0][1].settings.title
        sections = benchmark_sections(found[0][1])
    else:
        title, sections = _SEVERAL, []
        for _, results in found:
            first, *others = benchmark_sections(results)
            sections.append(replace(first, title=results.settings.title))
            sections += [replace(s, level=3 if s.level == 2 else 4) for s in others]
    place = folders[0] if out is None else out
    place.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.md": render_markdown(title, sections),
        "report.csv": render_csv(found),
        "report.html": render_page(title, sections),
    }
    for name, text in texts.items():
        write_text(place / name, text)
    return [place / name for name in texts]


def benchmark_sections(results: Results) -> list[Section]:
    """Sections about one folder; the first section has no title of its own."""
    settings = results.settings
    places = results.places()
    first: list[Block] = [Paragraph(settings.about)] if settings.about else []
    rows = {r["row"] for r in results.records}
    first.append(
        Paragraph(
            f"{counted(len(results.records), 'run', 'runs')} of "
            f"{counted(len(rows), 'row', 'rows')} on "
            f"{counted(len(places), 'data set and budget', 'data sets and budgets')}; "
            f"seeds {', '.join(map(str, settings.seeds))}."
        )
    )
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
    numbers = published_numbers(results, place)
    begin: list[Block] = [Paragraph(_trained(results, place), "soft")]
    if warnings := _warnings(results, place):
        begin.append(Bullets(warnings))
    scores: list[Block] = [
        scores_table(results, place),
        Paragraph(_how_to_read(results, place), "soft"),
    ]
    sections = [
        Section(results.title(place), begin),
        Section("Scores", [*scores, Figures(score_figures(results, place))], level=3),
    ]
    differences = differences_table(results, place)
    if differences.rows:
        remark = (
            "Mean of the differences paired by seed and its 95 % interval over seeds "
            "(Student's t). An interval without 0 is one of many here: some of them leave out "
            "0 by chance."
        )
        blocks: list[Block] = [differences, Paragraph(remark, "soft")]
        sections.append(Section("Differences to the rows compared with", blocks, level=3))
    if results.measures and (curves := curve_figures(results, place, results.measures[0])):
        remark = (
            "Mean over seeds, at the epochs that every seed measured; seconds are of training "
            "alone. Broken level lines: rows that train nothing."
        )
        title = f"{results.measures[0]} while training"
        sections.append(Section(title, [Paragraph(remark, "soft"), Figures(curves)], level=3))
    if losses := loss_figures(results, place):
        remark = (
            "Mean over seeds. Each method minimises a loss of its own, on a scale of its own: "
            "the lower of two methods' losses does not mean the better features."
        )
        blocks = [Paragraph(remark, "soft"), Figures(losses)]
        sections.append(Section("Loss while training", blocks, level=3))
    if numbers:
        remark = (
            "Published by others, with other code, hardware, budgets and protocols: they are no "
            "part of this comparison."
        )
        folded = f"{len(numbers)} reported numbers and their sources"
        blocks = [Paragraph(remark, "soft"), Folded(folded, [published_table(numbers)])]
        sections.append(Section("Reported numbers", blocks, level=3))
    return sections


def _trained(results: Results, place: Place) -> str:
    held = [r for row in results.rows(place) for r in results.runs(place, row).values()]
    trained = [r for r in held if r["kind"] in ("plugin", "host")]
    if not trained:
        return "Nothing was trained."
    counts = []
    for values in ({r["epochs"] for r in trained}, {r["images"] for r in trained}):
        counts.append(" to ".join(f"{v:,}" for v in dict.fromkeys((min(values), max(values)))))
    return f"{counts[0]} epochs of {counts[1]} images."


def _warnings(results: Results, place: Place) -> list[str]:
    notes = []
    if missing := results.missing(place):
        listed = "; ".join(
            f"{results.label(row)}: {'seed' if len(seeds) == 1 else 'seeds'} "
            f"{', '.join(map(str, seeds))}"
            for row, seeds in missing.items()
        )
        notes.append(f"Missing runs. {listed}.")
    for row in results.rows(place):
        if keys := results.differing(place, row):
            notes.append(
                f"The seeds of {results.label(row)} ran with different settings: {', '.join(keys)}."
            )
    for row in results.rows(place):
        for base in results.settings.rows[row].bases:
            if keys := results.unlike(place, row, base):
                notes.append(
                    f"{results.label(row)} and {results.label(base)} are not of the same "
                    f"{', '.join(keys)}: their difference is not one of methods alone."
                )
    if len(commits := results.commits()) > 1:
        notes.append(f"Runs are of several versions of the plugin: {', '.join(commits)}.")
    machines = {
        f"{hardware(r['environment'])}, {r['threads']} threads"
        for row in results.rows(place)
        for r in results.runs(place, row).values()
        if r["seconds"] is not None
    }
    if len(machines) > 1:
        notes.append(
            f"Seconds and images/s are of {len(machines)} kinds of machine and threads, and do not "
            "compare."
        )
    return notes


def _how_to_read(results: Results, place: Place) -> str:
    ranks, first = place_ranks(results, place), (results.measures or [""])[0]
    words = ["Mean ± sample deviation over seeds."]
    if any(best_rows(results, place, measure) for measure in results.measures):
        words.append(
            "Bold: the highest mean of the rows of solo_ext and solo-learn, of those with the "
            "most seeds; whether it is apart from the others, the differences say."
        )
    references = [
        results.label(row) for row in results.rows(place) if results.settings.rows[row].reference
    ]
    if references:
        words.append(f"For reference, neither bold nor ranked: {', '.join(references)}.")
    if ranks:
        seeds = common_seeds({row: results.scores(place, row, first) for row in ranks})
        words.append(
            f"Mean rank: by {first} among the {counted(len(ranks), 'row', 'rows')} that have the "
            f"most seeds, 1 is the highest; over {'seed' if len(seeds) == 1 else 'seeds'} "
            f"{', '.join(map(str, seeds))}."
        )
    elif results.ranked(place):
        words.append("No mean rank: the rows with the most seeds share none.")
    words.append("n: seeds with that score, where fewer than the row has.")
    return " ".join(words)


def _hypotheses(results: Results) -> Section:
    """The verdicts, the claims, and what was not tested."""
    found = verdicts(results)
    tests = counted(len(found), "test was", "tests were")
    blocks: list[Block] = [
        Paragraph(
            "Written down before the runs, at the times given; one that is changed when runs of it "
            "are known stays undecided. Reproduced: the whole 95 % interval of the differences "
            "paired by seed is on the expected side. Contradicted: it is on the other side. "
            "Undecided: it holds 0, or there are fewer pairs than the hypothesis asks for. p: "
            f"paired t test, two-sided. {tests} made; where nothing differs, one in "
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
        "of training without evaluations, on machines that may have run other jobs. Peak "
        "memory is that of the training process."
    )
    sections = [
        Section(
            "What ran where",
            [environments_table(results.records), Paragraph(_patches(results))],
        ),
        Section(
            "How each number is measured",
            [Paragraph(measured), protocols_table(results.records)],
        ),
        Section("What each row trains", [rows_table(results)], level=3),
    ]
    changes = changes_table(results)
    if changes.rows:
        sections.append(Section("Changes of every row", [changes], level=3))
    if (tuning := results.settings.tuning) is not None:
        text = (
            f"Tuning: {tuning.trials} trials of each row, by {tuning.measure} "
            f"on {100 * tuning.holdout:g} % of the training images, held out."
        )
        last = sections.pop()
        sections.append(replace(last, blocks=[*last.blocks, Paragraph(text)]))
    return sections


def _patches(results: Results) -> str:
    """Which of solo-learn's methods were patched, from the records of the runs."""
    rows: dict[str, set[str]] = {}
    for record in results.records:
        patches = record["environment"]["host"].get("patches")
        if patches is None:
            return (
                "Some runs are of before solo-learn's methods were left as it has them: momentum "
                "networks were averaged in place, LARS and schedules were those of timm and torch."
            )
        for patch in patches:
            rows.setdefault(patch, set()).add(results.label(record["row"]))
    if not rows:
        return "solo-learn's methods train as it has them, without patches."
    listed = "; ".join(f"{patch} ({', '.join(sorted(of))})" for patch, of in sorted(rows.items()))
    return (
        "solo-learn's methods train as it has them, but for patches, of which docs/hosts.md says "
        f"what they change: {listed}."
    )


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
    text = _TEMPLATES.get_template("report.md.jinja").render(title=title, sections=sections)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def markdown_table(table: Table) -> str:
    """Markdown of one table."""
    module: Any = _TEMPLATES.get_template("report.md.jinja").make_module(
        {"title": "", "sections": []}
    )
    return str(module.table_of(table)).strip()


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


def _kind(block: Block) -> str:
    return type(block).__name__


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"escaped": escaped, "as_paragraph": _as_paragraph, "kind": _kind}


def render_csv(found: Iterable[tuple[str, Results]]) -> str:
    """Every number, not rounded: one line per score of each row, and per score of each difference.

    ``minus`` is the row that is subtracted, paired by seed; it is empty for a score. ``interval``
    is half the width of the mean's 95 % interval.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["benchmark", "dataset", "budget", "row", "minus", "measure"]
    writer.writerow([*head, "seeds", "mean", "deviation", "interval"])
    for name, results in found:
        for place in results.places():
            for row in results.rows(place):
                for base in ("", *results.settings.rows[row].bases):
                    for measure in dict.fromkeys((*results.measures, *results.all_measures())):
                        scores = list(results.scores(place, row, measure).values())
                        one = (
                            difference(results, place, row, base, measure)
                            if base
                            else estimate(scores)
                        )
                        if one is not None:
                            numbers = (one.count, one.mean, one.deviation, one.half)
                            writer.writerow([name, *place, row, base, measure, *numbers])
    return text.getvalue()
