"""The tables of a report, and the format of numbers in cells; a missing number is a dash."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from solo_ext.lab.experiments.records import Record
from solo_ext.lab.experiments.results import Place, Results
from solo_ext.lab.experiments.settings import Hypothesis
from solo_ext.lab.experiments.statistics import Estimate, Verdict, differences, estimate, mean_of
from solo_ext.lab.pages import Table

WHOSE = {
    "plugin": "solo_ext",
    "host": "solo-learn",
    "baseline": "baseline",
    "teacher": "teacher",
}
DASH = "\N{EN DASH}"
_BEFORE_PATCHES = "momentum networks averaged in place, LARS and schedules of timm and torch"
"""Patches that always applied when the oldest records were made, which do not name them."""


def mean_and_deviation(found: Estimate | None, of: int | None = None) -> str:
    """Mean and sample deviation; also the count if it is not ``of``, the row's number of seeds.

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
                *(mean_and_deviation(mean_of(results, place, row, m), count) for m in measures),
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
                found = (
                    estimate(differences(results, place, row, base, m)) for m in results.measures
                )
                name = f"{results.label(row)} minus {results.label(base)}"
                lines.append([name, str(pairs), *(mean_and_interval(one, pairs) for one in found)])
    head = ["Difference", "Pairs", *results.measures]
    return Table(head, lines, numeric=frozenset(range(1, len(head))))


def verdict_table(results: Results, found: Sequence[Verdict]) -> Table:
    """A line for each test of a hypothesis.

    >>> from solo_ext.lab.experiments.statistics import verdicts
    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})
    >>> verdict_table(results, verdicts(results)).rows[0][:4]
    ['better', 'digits', 'pcl above simclr in knn', '2']
    """

    lines = [
        [
            verdict.name,
            results.title(verdict.place),
            expectation(results, verdict.hypothesis),
            str(verdict.estimate.count if verdict.estimate else 0),
            mean_and_interval(verdict.estimate),
            verdict.answer + (f" ({verdict.reason})" if verdict.reason else ""),
        ]
        for verdict in found
    ]
    head = ["Hypothesis", "Data set", "Expected", "Pairs", "Difference, 95 % interval", "Verdict"]
    return Table(head, lines, numeric=frozenset({3, 4}))


def expectation(results: Results, claim: Hypothesis) -> str:
    """What a hypothesis expects of which rows, in which score.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0], "simclr": [90.0]})
    >>> expectation(results, results.settings.hypotheses["better"])
    'pcl above simclr in knn'
    """
    side = "above"
    if claim.direction == "not_above":
        side = f"at most {claim.margin:g} above" if claim.margin else "not above"
    elif claim.direction == "equal":
        side = f"within {claim.margin:g} of"
    points = f": {claim.expected}" if claim.expected else ""
    rows = f"{results.label(claim.row)} {side} {results.label(claim.base)}"
    return f"{rows} in {claim.measure}{points}"


def verdict_lines(results: Results, found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as ``verdicts.json`` has them; ``isolates``: in what the rows differ.

    >>> from solo_ext.lab.experiments.statistics import verdicts
    >>> from solo_ext.lab.experiments.results import example_results
    >>> results = example_results({"pcl": [91.0, 92.0], "simclr": [90.0, 90.5]})
    >>> (line,) = verdict_lines(results, verdicts(results))
    >>> line["claim"], line["difference"], line["pairs"]
    ('pcl is better', 1.25, 2)
    """
    return [
        {
            "claim": verdict.hypothesis.claim,
            "experiment": results.settings.title,
            "data": results.title(verdict.place),
            "expected": expectation(results, verdict.hypothesis),
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


def environments_table(records: Sequence[Record]) -> Table:
    """One line per combination of machine, versions, code and number of threads.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> (row,) = environments_table(example_results({"pcl": [91.0, 92.0]}).records).rows
    >>> row[0], row[2]
    ('2', 'a processor, 2 cores, no GPU')
    """
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


def protocols_table(records: Sequence[Record]) -> Table:
    """Settings of every protocol, and how many runs were measured with them.

    >>> from solo_ext.lab.experiments.results import example_results
    >>> protocols_table(example_results({"pcl": [91.0, 92.0]}).records).rows
    [['knn', 'defaults', '2']]
    """
    counts = Counter(
        (name, ", ".join(f"{key} {json.dumps(v)}" for key, v in (given or {}).items()))
        for record in records
        for name, given in record["evaluation"].items()
    )
    lines = [[name, given or "defaults", str(count)] for (name, given), count in counts.items()]
    return Table(["Protocol", "Settings", "Runs"], lines, numeric=frozenset({2}))
