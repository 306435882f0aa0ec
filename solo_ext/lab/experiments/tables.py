"""The tables of a report, and the format of numbers in cells; a missing number is a dash."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

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
"""What records of before patches were a choice ran with."""


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

    def signed(value: float) -> str:
        return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")

    text = signed(found.mean)
    if found.low is not None and found.high is not None:
        text += f" ({signed(found.low)} to {signed(found.high)})"
    return text if of is None or found.count == of else f"{text} (n = {found.count})"


def scores_table(results: Results, place: Place) -> Table:
    """A line for each row: its scores and its cost."""
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
        held = [(record["memory"] or {}).get(kind) or 0 for record in records]
        shown += [f"{name}{max(held) / 2**30:.2f} GiB"] if any(held) else []
    return ", ".join(shown) or DASH


def differences_table(results: Results, place: Place) -> Table:
    """Every row minus each of its bases, paired by seed."""
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
    """A line for each test of a hypothesis."""

    def p_value(value: float | None) -> str:
        if value is None:
            return DASH
        return "< 0.001" if value < 0.001 else f"{value:.3f}"

    def expected(claim: Hypothesis) -> str:
        side: str = claim.direction
        if side == "not_above":
            side = f"at most {claim.margin:g} above" if claim.margin else "not above"
        return f"{results.label(claim.row)} {side} {results.label(claim.base)} in {claim.measure}"

    lines = [
        [
            verdict.name,
            results.title(verdict.place),
            expected(verdict.hypothesis),
            str(verdict.pairs),
            mean_and_interval(verdict.estimate),
            p_value(verdict.p_value),
            p_value(verdict.adjusted),
            verdict.answer + (f" ({verdict.reason})" if verdict.reason else ""),
        ]
        for verdict in found
    ]
    head = ["Hypothesis", "Data set", "Expected", "Pairs", "Difference, 95 % interval"]
    return Table([*head, "p", "Holm's p", "Verdict"], lines, numeric=frozenset({3, 4, 5, 6}))


def environments_table(records: Sequence[Record]) -> Table:
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


def protocols_table(records: Sequence[Record]) -> Table:
    """Settings of every protocol, and how many runs were measured with them."""
    # Import it here: the protocols import torch, which nothing else in a report needs.
    from solo_ext.lab.evaluation.evaluate import PROTOCOLS

    counts = Counter(
        (name, ", ".join(f"{key} {json.dumps(v)}" for key, v in (given or {}).items()))
        for record in records
        for name, given in record["evaluation"].items()
    )
    lines = [
        [
            name,
            PROTOCOLS[name].title if name in PROTOCOLS else DASH,
            given or "defaults",
            str(count),
        ]
        for (name, given), count in counts.items()
    ]
    return Table(["Protocol", "What", "Settings", "Runs"], lines, numeric=frozenset({3}))


def rows_table(results: Results) -> Table:
    """What each row trains."""
    lines = [
        [
            results.label(name),
            name,
            row.config or row.baseline or DASH,
            ", ".join(row.changes) or DASH,
            ", ".join(row.bases) or DASH,
        ]
        for name, row in results.settings.rows.items()
    ]
    return Table(["Row", "Name", "Config", "Changes", "Compared with"], lines)
