"""``solo-ext benchmark report``: records as Markdown, without figures, and as one HTML page."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Drawing

from solo_ext.core.files import write_text
from solo_ext.lab.experiments.records import SETTINGS, Record
from solo_ext.lab.experiments.results import WHOSE, Estimate, Place, Results, estimate, read_results
from solo_ext.lab.experiments.settings import Hypothesis
from solo_ext.lab.experiments.verdicts import Verdict, verdicts
from solo_ext.lab.pages import (
    Block,
    Bullets,
    Card,
    Cards,
    Figure,
    Figures,
    Paragraph,
    Section,
    Table,
    plain_text,
    png_of,
    render_markdown,
    render_page,
)

DASH = "\N{EN DASH}"
_BEFORE_PATCHES = "momentum networks averaged in place, LARS and schedules of timm and torch"
"""Patches that always applied when the oldest records were made; those name no patches."""
_MOST_LINES = 8
_COLOURS = dict(zip(WHOSE, ("C0", "C1", "C7", "C4"), strict=True))


def write_report(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes ``report.md``, ``report.html`` and, where there are hypotheses, ``verdicts.json``.

    Args:
        folder: written by ``solo-ext benchmark run``, or a folder of several such folders; its page
            begins with all verdicts.
        out: folder of the report; null: ``folder``.

    Raises:
        UserError: the folder has no settings or records, or invalid ones.

    >>> write_report(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: records 'nowhere': no records.jsonl in it; give a ...
    """
    inner = [] if (folder / SETTINGS).is_file() else sorted(folder.glob(f"*/{SETTINGS}"))
    every = [read_results(file.parent) for file in inner] or [read_results(folder)]
    title, sections = every[0].settings.title, benchmark_sections(every[0])
    if inner:
        claims: list[Block] = [claims_table(every), Paragraph(claims_remark(every))]
        title, sections = folder.resolve().name, [Section("Claims", claims)]
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
    """One line per verdict of several benchmarks.

    >>> claims_table([]).head
    ['Claim', 'Expected', 'Difference, 95 % interval', 'Verdict']
    """
    lines = [
        [verdict.hypothesis.claim, _expectation(results, verdict.hypothesis), *_outcome(verdict)]
        for results in every
        for verdict in verdicts(results)
    ]
    head = ["Claim", "Expected", "Difference, 95 % interval", "Verdict"]
    return Table(head, lines, numeric=frozenset({2}))


def claims_remark(every: Sequence[Results]) -> str:
    """What the numbers below ``claims_table`` mean.

    >>> claims_remark([]).splitlines()[0][:20]
    'Points of the score,'
    """
    return (
        "Points of the score, mean of the differences paired by seed with its 95 % interval. "
        "Expected: what the source leads to, and what was written down before the runs; a claim is "
        "reproduced if the whole interval is above 0, whatever was expected. An experiment with "
        "fewer pairs than were planned is undecided. "
        + _tests_made(sum(len(verdicts(results)) for results in every))
    )


def _tests_made(count: int) -> str:
    return (
        f"Tests made: {count}; where nothing differs, one in twenty of such intervals leaves out 0 "
        "by chance."
    )


def benchmark_sections(results: Results) -> list[Section]:
    """The content of a report; the first section has no title of its own.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> benchmark_sections(Results(read_benchmark("demo"), []))[0].blocks[-1]
    Bullets(items=['No runs yet: digits (default).'])
    """
    settings, places = results.settings, results.places()
    seeds = ", ".join(map(str, settings.seeds))
    rows = len({r["row"] for r in results.records})
    counts = f"{len(results.records)} runs of {rows} rows; seeds {seeds}."
    first: list[Block] = [Paragraph(text) for text in (settings.about, counts) if text]
    notes = []
    if results.left_out:
        why = "Left out, as the settings do not name them or a later run is there"
        notes.append(f"{why}: {', '.join(results.left_out)}.")
    if empty := results.places(empty=True):
        notes.append(f"No runs yet: {', '.join(f'{p.dataset} ({p.budget})' for p in empty)}.")
        notes += [note for place in empty for note in _unfinished(results, place)]
    if notes:
        first.append(Bullets(notes))
    sections = [Section("", first)]
    for place in places:
        sections += _place_sections(results, place)
    if settings.hypotheses:
        sections.append(_hypotheses(results))
    if results.records:
        held_out = any((r["config"].get("data") or {}).get("holdout") for r in results.records)
        test = "the test split, which chooses nothing"
        split = "held-out training images" if held_out else test
        how = Paragraph(_MEASURED.format(split=split, settings=SETTINGS))
        measured: list[Block] = [how, _protocols_table(results.records)]
        sections += [
            Section("What ran where", [_environments_table(results.records)]),
            Section("How each number is measured", measured),
        ]
    return sections


_MEASURED = (
    "Scores are percent, after the last epoch, on {split}; the backbone is frozen "
    "unless the protocol says otherwise. Seconds and images/s are of training "
    "without evaluations, on machines that may have run other jobs, and compare only where machine "
    "and threads are the same. Peak memory is that of the training process. Settings that are not "
    "named are the protocol's defaults; what each row trains is in {settings}."
)


def _place_sections(results: Results, place: Place) -> list[Section]:
    held = [r for row in results.rows(place) for r in results.runs(place, row).values()]
    trained = {f"{r['epochs']:,} epochs of {r['images']:,} images" for r in held if r["epochs"]}
    about = [f"Trained: {', '.join(sorted(trained)) or 'nothing'}.", *_warnings(results, place)]
    sections = [Section(results.title(place), [_best_cards(results, place), Bullets(about)])]

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


def _best_cards(results: Results, place: Place) -> Cards:
    """The row with the highest mean in each measure, as the table's bold cells."""
    cards = []
    for measure in results.measures:
        for row in list(results.best(place, measure))[:1]:
            value = mean_and_deviation(results.mean(place, row, measure))
            cards.append(Card(f"Best {measure}", value, results.label(row)))
    return Cards(cards)


def _warnings(results: Results, place: Place) -> list[str]:
    notes = []
    if missing := results.missing(place):
        listed = "; ".join(
            f"{results.label(row)}: seeds {', '.join(map(str, seeds))}"
            for row, seeds in missing.items()
        )
        notes.append(f"Missing runs. {listed}.")
    notes += _unfinished(results, place)
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


def _unfinished(results: Results, place: Place) -> list[str]:
    return [
        f"Unfinished: {results.label(run['row'])}, seed {run.get('seed')}, {run.get('epochs')} of "
        f"{run.get('of')} epochs. No result."
        for run in results.unfinished(place)
    ]


def _hypotheses(results: Results) -> Section:
    found = verdicts(results)
    blocks: list[Block] = [
        Paragraph(
            "Written down before the runs, at the times given; one that is changed when runs of it "
            "are known stays undecided. Reproduced: the whole 95 % interval of the differences "
            "paired by seed is above 0, or, where no gain is claimed, not above the margin. "
            "Equivalent: it is within the margin. Contradicted: it is on the other side. The "
            "points that were expected are what the source leads to; they decide nothing. "
            + _tests_made(len(found))
        )
    ]
    if found:
        blocks.append(_verdict_table(results, found))
    tested = {verdict.name for verdict in found}
    claims = []
    for name, hypothesis in results.settings.hypotheses.items():
        untested = "" if name in tested else " Not tested: no pair of runs has this score."
        note = f" Note: {hypothesis.note}" if hypothesis.note else ""
        claim = hypothesis.claim.rstrip(".")
        since = f" Written {results.written[name]}." if name in results.written else ""
        claims.append(f"{name}: {claim}. {hypothesis.source}.{since}{untested}{note}")
    return Section("Hypotheses", [*blocks, Bullets(claims)])


def mean_and_deviation(found: Estimate | None, of: int | None = None) -> str:
    """Mean and sample deviation; also the count if it is not ``of``, the row's number of seeds.

    >>> mean_and_deviation(estimate([50.0, 53.0, 52.0]))
    '51.67 ± 1.53'
    """
    if found is None:
        return DASH
    spread = "" if found.deviation is None else f" ± {found.deviation:.2f}"
    return f"{found.mean:.2f}{spread}{_count(found, of)}"


def mean_and_interval(found: Estimate | None, of: int | None = None) -> str:
    """A difference and its 95 % interval, in the format of :func:`mean_and_deviation`.

    >>> mean_and_interval(estimate([2.0, 4.0, 1.0]))
    '+2.33 (−1.46 to +6.13)'
    """
    if found is None:
        return DASH
    spread = "" if found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
    text = f"{found.mean:+.2f}{spread}".replace("-", "\N{MINUS SIGN}")
    return text + _count(found, of)


def _count(found: Estimate, of: int | None) -> str:
    return "" if of in (None, found.count) else f" (n = {found.count})"


def scores_table(results: Results, place: Place) -> Table:
    """One line per row, with its scores and its cost.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> scores_table(Results(read_benchmark("demo"), []), Place("digits", "default")).head[:3]
    ['Row', 'Whose', 'Seeds']
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
    shown = []
    for kind, name in (("resident", ""), ("cuda", "GPU ")):
        peak = max((record["memory"] or {}).get(kind) or 0 for record in records)
        shown += [f"{name}{peak / 2**30:.2f} GiB"] if peak else []
    return ", ".join(shown) or DASH


def differences_table(results: Results, place: Place) -> Table:
    """Every row minus each of its bases, paired by seed.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> differences_table(Results(read_benchmark("demo"), []), Place("digits", "default")).head[:2]
    ['Difference', 'Pairs']
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
    lines = [
        [
            verdict.name,
            results.title(verdict.place),
            _expectation(results, verdict.hypothesis),
            str(verdict.estimate.count if verdict.estimate else 0),
            *_outcome(verdict),
        ]
        for verdict in found
    ]
    head = ["Hypothesis", "Data set", "Expected", "Pairs", "Difference, 95 % interval", "Verdict"]
    return Table(head, lines, numeric=frozenset({3, 4}))


def _outcome(verdict: Verdict) -> tuple[str, str]:
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return mean_and_interval(verdict.estimate), verdict.answer + reason


def _expectation(results: Results, claim: Hypothesis) -> str:
    side = "above"
    if claim.direction == "not_above":
        side = f"at most {claim.margin:g} above" if claim.margin else "not above"
    elif claim.direction == "equal":
        side = f"within {claim.margin:g} of"
    points = f": {claim.expected}" if claim.expected else ""
    rows = f"{results.label(claim.row)} {side} {results.label(claim.base)}"
    return f"{rows} in {claim.measure}{points}"


def _verdict_lines(results: Results, found: Sequence[Verdict]) -> list[dict[str, Any]]:
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
    groups: dict[str, list[Record]] = {}
    for record in records:
        same = [record["environment"], record["code"], record["threads"]]
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    lines = []
    for held in sorted(groups.values(), key=lambda g: min(r["finished"] for r in g)):
        found, code = held[0]["environment"], held[0]["code"]
        host = found["host"]
        finished = sorted(r["finished"][:10] for r in held)
        changed = "uncommitted changes, or resumed with other code" if code.get("changed") else ""
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
    counts = Counter(
        (name, ", ".join(f"{key} {json.dumps(v)}" for key, v in (given or {}).items()))
        for record in records
        for name, given in record["evaluation"].items()
    )
    lines = [[name, given or "defaults", str(count)] for (name, given), count in counts.items()]
    return Table(["Protocol", "Settings", "Runs"], lines, numeric=frozenset({2}))


def _score_figures(results: Results, place: Place) -> list[Figure]:
    """One figure per measure: the scores of each row's seeds, their mean and deviation."""
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
            # Keep the figure this narrow, so that a phone shows its text at 10 pixels.
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
    """One figure per family of rows: the score over epochs, and over seconds of training."""
    rows = [row for row in results.rows(place) if results.curve(place, row, measure)]
    levels = {
        row: found.mean
        for row in results.rows(place)
        if results.kind(place, row) == "baseline"
        and (found := results.mean(place, row, measure)) is not None
    }
    figures = []
    for family in _families(results, rows):
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


def _families(results: Results, rows: Sequence[str]) -> list[list[str]]:
    """Groups rows by chart: each base with the rows compared with it, then all other rows."""
    bases = {row: [r for r in rows if row in results.settings.rows[r].bases] for row in rows}
    found = [[base, *compared] for base, compared in bases.items() if compared]
    shown = {row for family in found for row in family}
    found.append([row for row in rows if row not in shown])
    return [
        family[start : start + _MOST_LINES]
        for family in found
        for start in range(0, len(family), _MOST_LINES)
    ]
