"""``solo-ext benchmark report``: records as Markdown, without figures, and as one HTML page."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from solo_ext.core.files import write_text
from solo_ext.lab.experiments.charts import curve_figures, score_figures
from solo_ext.lab.experiments.records import SETTINGS, Record
from solo_ext.lab.experiments.results import WHOSE, Estimate, Place, Results, read_results
from solo_ext.lab.experiments.settings import Hypothesis
from solo_ext.lab.experiments.verdicts import Verdict, verdicts
from solo_ext.lab.pages import (
    Block,
    Bullets,
    Figures,
    Paragraph,
    Section,
    Table,
    render_markdown,
    render_page,
)

DASH = "\N{EN DASH}"
_BEFORE_PATCHES = "momentum networks averaged in place, LARS and schedules of timm and torch"
"""Patches that always applied when the oldest records were made, which do not name them."""


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
        "report.md": render_markdown(title, sections),
        "report.html": render_page(title, sections),
    }
    lines = [line for results in every for line in _verdict_lines(results, verdicts(results))]
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
            _expectation(results, verdict.hypothesis),
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
        measured: list[Block] = [Paragraph(_MEASURED), _protocols_table(results.records)]
        sections += [
            Section("What ran where", [_environments_table(results.records)]),
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
        blocks.append(_verdict_table(results, found))
    tested = {verdict.name for verdict in found}
    claims = []
    for name, hypothesis in results.settings.hypotheses.items():
        untested = "" if name in tested else " Not tested: no runs of both rows."
        note = f" Note: {hypothesis.note}" if hypothesis.note else ""
        claim = hypothesis.claim.rstrip(".")
        since = f" Written {results.written[name]}." if name in results.written else ""
        claims.append(f"{name}: {claim}. {hypothesis.source}.{since}{untested}{note}")
    return Section("Hypotheses", [*blocks, Bullets(claims)])


def mean_and_deviation(found: Estimate | None, of: int | None = None) -> str:
    """Mean and sample deviation; also the count if it is not ``of``, the row's number of seeds.

    >>> from solo_ext.lab.experiments.results import estimate
    >>> mean_and_deviation(estimate([50.0, 53.0, 52.0]))
    '51.67 ± 1.53'
    """
    if found is None:
        return DASH
    text = f"{found.mean:.2f}"
    if found.deviation is not None:
        text += f" ± {found.deviation:.2f}"
    return text if of is None or found.count == of else f"{text} (n = {found.count})"


def mean_and_interval(found: Estimate | None, of: int | None = None) -> str:
    """A difference and its 95 % interval; also the count if it is not ``of``.

    >>> from solo_ext.lab.experiments.results import estimate
    >>> mean_and_interval(estimate([2.0, 4.0, 1.0]))
    '+2.33 (−1.46 to +6.13)'
    """
    if found is None:
        return DASH
    text = f"{found.mean:+.2f}"
    if found.low is not None and found.high is not None:
        text += f" ({found.low:+.2f} to {found.high:+.2f})"
    text = text.replace("-", "\N{MINUS SIGN}")
    return text if of is None or found.count == of else f"{text} (n = {found.count})"


def scores_table(results: Results, place: Place) -> Table:
    """A line for each row: its scores and its cost.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})
    >>> [row[:4] for row in scores_table(results, results.places()[0]).rows]
    [['pcl', 'solo_ext', '2', '91.50 ± 0.71'], ['simclr', 'solo_ext', '2', '90.25 ± 0.35']]
    """
    rows, measures = results.rows(place), results.measures
    absent = {row: len(seeds) for row, seeds in results.missing(place).items()}
    lines = []
    for row in rows:
        held = results.runs(place, row).values()
        count = len(held)
        lines.append(
            [
                results.label(row),
                WHOSE[results.kind(place, row)],
                f"{count} of {count + absent[row]}" if row in absent else str(count),
                *(mean_and_deviation(results.mean(place, row, m), count) for m in measures),
                _mean(r["seconds"] for r in held),
                _mean(r["images_per_second"] for r in held),
                _peaks(held),
            ]
        )
    head = ["Row", "Whose", "Seeds", *measures, "Seconds", "Images/s", "Peak memory"]
    bold = {
        (rows.index(row), column)
        for column, measure in enumerate(measures, 3)
        for row in results.best(place, measure)
    }
    return Table(head, lines, numeric=frozenset(range(2, len(head))), bold=frozenset(bold))


def _mean(values: Iterable[float | None]) -> str:
    held = [value for value in values if value is not None]
    if not held:
        return DASH
    mean = statistics.fmean(held)
    return f"{mean:,.0f}" if mean >= 10 else f"{mean:.1f}"


def _peaks(records: Collection[Record]) -> str:
    """The highest peaks of main memory and of the GPU's."""
    shown = []
    for kind, name in (("resident", ""), ("cuda", "GPU ")):
        peak = max((record["memory"] or {}).get(kind) or 0 for record in records)
        shown += [f"{name}{peak / 2**30:.2f} GiB"] if peak else []
    return ", ".join(shown) or DASH


def differences_table(results: Results, place: Place) -> Table:
    """Every row minus each of its bases, paired by seed.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})
    >>> differences_table(results, results.places()[0]).rows
    [['pcl minus simclr', '2', '+1.25 (−1.93 to +4.43)']]
    """
    lines = []
    for row in results.rows(place):
        for base in results.settings.rows[row].bases:
            pairs = len(results.runs(place, row).keys() & results.runs(place, base).keys())
            if results.runs(place, base):
                found = (results.difference(place, row, base, m) for m in results.measures)
                name = f"{results.label(row)} minus {results.label(base)}"
                lines.append([name, str(pairs), *(mean_and_interval(one, pairs) for one in found)])
    head = ["Difference", "Pairs", *results.measures]
    return Table(head, lines, numeric=frozenset(range(1, len(head))))


def _verdict_table(results: Results, found: Sequence[Verdict]) -> Table:
    """A line for each test of a hypothesis."""
    lines = [
        [
            verdict.name,
            results.title(verdict.place),
            _expectation(results, verdict.hypothesis),
            str(verdict.estimate.count if verdict.estimate else 0),
            mean_and_interval(verdict.estimate),
            verdict.answer + (f" ({verdict.reason})" if verdict.reason else ""),
        ]
        for verdict in found
    ]
    head = ["Hypothesis", "Data set", "Expected", "Pairs", "Difference, 95 % interval", "Verdict"]
    return Table(head, lines, numeric=frozenset({3, 4}))


def _expectation(results: Results, claim: Hypothesis) -> str:
    """What a hypothesis expects of which rows, in which score."""
    side = "above"
    if claim.direction == "not_above":
        side = f"at most {claim.margin:g} above" if claim.margin else "not above"
    elif claim.direction == "equal":
        side = f"within {claim.margin:g} of"
    points = f": {claim.expected}" if claim.expected else ""
    rows = f"{results.label(claim.row)} {side} {results.label(claim.base)}"
    return f"{rows} in {claim.measure}{points}"


def _verdict_lines(results: Results, found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as ``verdicts.json`` has them; ``isolates``: in what the rows differ."""
    return [
        {
            "claim": verdict.hypothesis.claim,
            "experiment": results.settings.title,
            "data": results.title(verdict.place),
            "expected": _expectation(results, verdict.hypothesis),
            "difference": verdict.estimate and verdict.estimate.mean,
            "low": verdict.estimate and verdict.estimate.low,
            "high": verdict.estimate and verdict.estimate.high,
            "pairs": verdict.estimate.count if verdict.estimate else 0,
            "verdict": verdict.answer,
            "reason": verdict.reason,
            "isolates": verdict.hypothesis.isolates,
        }
        for verdict in found
    ]


def _environments_table(records: Sequence[Record]) -> Table:
    """One line per combination of machine, versions, code and number of threads."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        same = [record["environment"], record["code"], record["threads"]]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    lines = []
    for held in sorted(groups.values(), key=lambda g: min(r["finished"] for r in g)):
        found, code = held[0]["environment"], held[0]["code"]
        host = found["host"]
        finished = sorted(r["finished"][:10] for r in held)
        changed = "with changes that are not committed" if code.get("changed") else ""
        hardware = [found["processor"], f"{found['cores']} cores", *(found["gpus"] or ["no GPU"])]
        versions = {"python": found["python"], **found["packages"], "CUDA": found["cuda"]}
        patches = ", ".join(host.get("patches", [_BEFORE_PATCHES])) or "none"
        generations = dict.fromkeys(str(host[k]) for k in ("generation", "version") if host.get(k))
        lines.append(
            [
                str(len(held)),
                f"solo-learn {', '.join(generations)} ({host['fingerprint']}), patches: {patches}",
                ", ".join(hardware),
                str(held[0]["threads"]),
                ", ".join(filter(None, (code["version"], code.get("commit", "")[:12], changed))),
                " to ".join(dict.fromkeys((finished[0], finished[-1]))),
                ", ".join(f"{name} {version}" for name, version in versions.items() if version),
            ]
        )
    head = ["Runs", "Host", "Hardware", "Threads", "Code", "Finished", "Versions"]
    return Table(head, lines, numeric=frozenset({3}))


def _protocols_table(records: Sequence[Record]) -> Table:
    """Settings of every protocol, and how many runs were measured with them."""
    counts = Counter(
        (name, ", ".join(f"{key} {json.dumps(v)}" for key, v in (given or {}).items()))
        for record in records
        for name, given in record["evaluation"].items()
    )
    lines = [[name, given or "defaults", str(count)] for (name, given), count in counts.items()]
    return Table(["Protocol", "Settings", "Runs"], lines, numeric=frozenset({2}))
