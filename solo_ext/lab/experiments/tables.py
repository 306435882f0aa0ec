"""The tables of a report, and the format of numbers in cells; a missing number is a dash."""

from __future__ import annotations

import csv
import functools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solo_ext.core.errors import ConfigError, nearest
from solo_ext.lab.experiments.records import Record
from solo_ext.lab.experiments.results import Place, Results
from solo_ext.lab.experiments.settings import Hypothesis, Reported
from solo_ext.lab.experiments.statistics import Estimate, estimate, mean_ranks, paired_differences
from solo_ext.lab.experiments.verdicts import Verdict
from solo_ext.lab.pages import Table

WHOSE = {
    "plugin": "solo_ext",
    "host": "solo-learn",
    "baseline": "baseline",
    "teacher": "teacher",
}
PUBLISHED = {"knn_top1": "kNN", "linear_top1": "linear", "finetune_top1": "fine-tuned"}
"""Names of the scores among the published numbers."""
DASH = "\N{EN DASH}"
_FILE = Path(__file__).with_name("published.csv")


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


def counted(count: int, one: str, many: str) -> str:
    """A number and its noun.

    >>> counted(1, "run", "runs"), counted(2, "run", "runs")
    ('1 run', '2 runs')
    """
    return f"{count} {one if count == 1 else many}"


def scores_table(results: Results, place: Place) -> Table:
    """A line for each row: scores, rank and cost."""
    rows, measures = results.rows(place), results.measures
    ranks = place_ranks(results, place)
    cuda = any(peak(results.runs(place, row).values(), "cuda") for row in rows)
    lines = []
    for row in rows:
        held = list(results.runs(place, row).values())
        absent = len(results.missing(place).get(row, ()))
        lines.append(
            [
                results.label(row),
                WHOSE[results.kind(place, row)],
                f"{len(held)} of {len(held) + absent}" if absent else str(len(held)),
                *(
                    mean_and_deviation(
                        estimate(list(results.scores(place, row, measure).values())), len(held)
                    )
                    for measure in measures
                ),
                f"{ranks[row]:.1f}" if row in ranks else DASH,
                _whole(mean_cost(held, "seconds")),
                _whole(mean_cost(held, "images_per_second")),
                _gibibytes(peak(held, "resident")),
                *([_gibibytes(peak(held, "cuda"))] if cuda else ()),
            ]
        )
    head = [
        "Row",
        "Whose",
        "Seeds",
        *measures,
        "Mean rank",
        "Seconds",
        "Images/s",
        "Peak memory",
        *(["Peak GPU memory"] if cuda else ()),
    ]
    return Table(
        head,
        lines,
        numeric=frozenset(range(2, len(head))),
        bold=frozenset(
            (rows.index(row), 3 + column)
            for column, measure in enumerate(measures)
            for row in best_rows(results, place, measure)
        ),
    )


def differences_table(results: Results, place: Place) -> Table:
    """Every row minus each of its bases, paired by seed."""
    lines = []
    for row in results.rows(place):
        for base in results.settings.rows[row].bases:
            pairs = len(results.runs(place, row).keys() & results.runs(place, base).keys())
            if results.runs(place, base):
                found = (difference(results, place, row, base, m) for m in results.measures)
                name = f"{results.label(row)} minus {results.label(base)}"
                lines.append([name, str(pairs), *(mean_and_interval(one, pairs) for one in found)])
    head = ["Difference", "Pairs", *results.measures]
    return Table(head, lines, numeric=frozenset(range(1, len(head))))


def difference(
    results: Results, place: Place, row: str, base: str, measure: str
) -> Estimate | None:
    """Estimate of a row's scores minus a base's, paired by seed."""
    pairs = paired_differences(
        results.scores(place, row, measure), results.scores(place, base, measure)
    )
    return estimate(list(pairs.values()))


def place_ranks(results: Results, place: Place) -> dict[str, float]:
    """Mean ranks by the first measure, of the ranked rows with the most seeds."""
    first = results.measures[0] if results.measures else ""
    return mean_ranks(_full_rows(results, place, first))


def best_rows(results: Results, place: Place, measure: str) -> list[str]:
    """Rows with the highest mean among those with most seeds; means that print alike are equal."""
    full = _full_rows(results, place, measure)
    shown = {row: f"{statistics.fmean(scores.values()):.2f}" for row, scores in full.items()}
    highest = max(shown.values(), key=float, default="")
    return [row for row, text in shown.items() if text == highest]


def _full_rows(results: Results, place: Place, measure: str) -> dict[str, dict[int, float]]:
    """Scores by seed of the ranked rows with the most seeds."""
    found = {row: results.scores(place, row, measure) for row in results.ranked(place)}
    most = max((len(by_seed) for by_seed in found.values()), default=0)
    return {row: by_seed for row, by_seed in found.items() if by_seed and len(by_seed) == most}


def mean_cost(records: Iterable[Record], key: str) -> float | None:
    """Mean of ``seconds`` or ``images_per_second`` over the runs that trained."""
    held = [value for record in records if (value := record[key]) is not None]  # type: ignore[literal-required]
    return statistics.fmean(held) if held else None


def peak(records: Iterable[Record], where: str) -> int | None:
    """The highest peak over runs, in bytes: of ``resident`` or ``cuda`` memory."""
    held = [record["memory"][where] for record in records if record["memory"] is not None]  # type: ignore[literal-required]
    return max((value for value in held if value), default=None)


def _whole(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _gibibytes(value: int | None) -> str:
    return DASH if value is None else f"{value / 2**30:.2f} GiB"


def verdict_table(results: Results, found: Sequence[Verdict]) -> Table:
    """A line for each test of a hypothesis."""

    def p_value(value: float | None) -> str:
        if value is None:
            return DASH
        return "< 0.001" if value < 0.001 else f"{value:.3f}"

    def expected(hypothesis: Hypothesis) -> str:
        if hypothesis.direction != "not_above":
            return hypothesis.direction
        return f"at most {hypothesis.margin:g} above" if hypothesis.margin else "not above"

    lines = [
        [
            verdict.name,
            results.title(verdict.place),
            f"{results.label(hypothesis.row)} {expected(hypothesis)} "
            f"{results.label(hypothesis.base)} in {hypothesis.measure}",
            str(verdict.pairs),
            mean_and_interval(verdict.estimate),
            p_value(verdict.p_value),
            p_value(verdict.adjusted),
            verdict.answer + (f" ({verdict.reason})" if verdict.reason else ""),
        ]
        for verdict in found
        for hypothesis in [verdict.hypothesis]
    ]
    head = ["Hypothesis", "Data set", "Expected", "Pairs", "Difference, 95 % interval"]
    return Table([*head, "p", "Holm's p", "Verdict"], lines, numeric=frozenset({3, 4, 5, 6}))


class PublishedNumber(NamedTuple):
    """One line of ``published.csv``; fields that were not published are empty.

    Attributes:
        registered: name in solo-learn's registry, if it is the same method.
        source: repository, commit and file.
    """

    library: str
    dataset: str
    method: str
    registered: str
    backbone: str
    batch: str
    epochs: str
    knn_top1: str
    knn_top5: str
    linear_top1: str
    linear_top5: str
    finetune_top1: str
    time_min: str
    peak_gpu_gb: str
    protocol: str
    hardware: str
    seeds: str
    note: str
    source: str


@functools.cache
def published() -> tuple[PublishedNumber, ...]:
    """Every published number."""
    with _FILE.open(newline="") as file:
        return tuple(PublishedNumber(**line) for line in csv.DictReader(file))


def selected(wanted: Reported, key: str = "reported") -> list[PublishedNumber]:
    """Published numbers for the wanted data set, backbone and epochs; null matches any.

    Args:
        wanted: from the settings of a data set.
        key: dotted key of ``wanted``, for the error.

    Raises:
        ConfigError: nothing matches.

    >>> len(selected(Reported(dataset="CIFAR-10", backbone="ResNet18")))
    16
    """
    found: list[PublishedNumber] = list(published())
    for field, value in wanted.model_dump(exclude_none=True).items():
        allowed = {str(getattr(n, field)) for n in found} - {""}
        found = [number for number in found if getattr(number, field) == str(value)]
        if not found:
            raise ConfigError(
                f"{key}.{field}",
                value,
                "no published numbers of it"
                + ("" if field == "dataset" else " and what is before"),
                nearest(str(value), allowed, show=40),
            )
    return found


def published_numbers(results: Results, place: Place) -> list[PublishedNumber]:
    """Published numbers that the settings of the data set select."""
    wanted = results.settings.datasets[place.dataset].reported
    key = f"datasets.{place.dataset}.reported"
    return [number for one in wanted for number in selected(one, key)]


def published_table(numbers: Sequence[PublishedNumber]) -> Table:
    """The published numbers unchanged, without empty columns."""
    head = {
        "library": "Reported by",
        "method": "Method",
        "backbone": "Backbone",
        "batch": "Batch",
        "epochs": "Epochs",
        **{field: f"reported {name}" for field, name in PUBLISHED.items()},
        "seeds": "Seeds",
        "protocol": "Protocol",
        "hardware": "Hardware",
        "note": "Note",
        "source": "Source",
    }
    held = {field: name for field, name in head.items() if any(getattr(n, field) for n in numbers)}
    numeric = {"batch", "epochs", *PUBLISHED, "seeds"}
    return Table(
        list(held.values()),
        [[getattr(n, field) or DASH for field in held] for n in numbers],
        numeric=frozenset(i for i, field in enumerate(held) if field in numeric),
    )


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
        said = [code["version"], code.get("commit", "")[:12]]
        said += ["with changes that are not committed"] if code.get("changed") else []
        named = {"python": found["python"], **found["packages"], "CUDA": found["cuda"]}
        generations = dict.fromkeys(str(host[k]) for k in ("generation", "version") if host.get(k))
        lines.append(
            [
                str(len(held)),
                f"solo-learn {', '.join(generations)} ({host['fingerprint']})",
                hardware(found),
                str(held[0]["threads"]),
                ", ".join(filter(None, said)),
                " to ".join(dict.fromkeys((finished[0], finished[-1]))),
                ", ".join(f"{name} {version}" for name, version in named.items() if version),
            ]
        )
    head = ["Runs", "Host", "Hardware", "Threads", "Code", "Finished", "Versions"]
    return Table(head, lines, numeric=frozenset({3}))


def hardware(environment: Mapping[str, Any]) -> str:
    """Processor, cores and GPUs.

    >>> hardware({"processor": "AMD EPYC", "cores": 2, "gpus": ["NVIDIA H200"]})
    'AMD EPYC, 2 cores, NVIDIA H200'
    """
    cores = f"{environment['cores']} cores"
    return ", ".join([environment["processor"], cores, *(environment["gpus"] or ["no GPU"])])


def protocols_table(records: Sequence[Record]) -> Table:
    """Settings of every protocol, with defaults, and how many runs were measured with them."""
    # Import it here: the protocols import torch, which nothing else in a report needs.
    from solo_ext.lab.evaluation.evaluate import PROTOCOLS

    def settings_of(name: str, given: Mapping[str, Any] | None) -> str:
        fields = PROTOCOLS[name].model_fields if name in PROTOCOLS else {}
        defaults = {
            key: field.get_default(call_default_factory=True)
            for key, field in fields.items()
            if not field.is_required()
        }
        values = defaults | dict(given or {})
        return ", ".join(
            f"{key} {value if isinstance(value, str) else json.dumps(value, default=str)}"
            for key, value in values.items()
        )

    counts: dict[tuple[str, str], int] = {}
    for record in records:
        for name, given in record["evaluation"].items():
            entry = name, settings_of(name, given)
            counts[entry] = counts.get(entry, 0) + 1
    lines = [
        [name, PROTOCOLS[name].title if name in PROTOCOLS else DASH, settings or DASH, str(count)]
        for (name, settings), count in counts.items()
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


def changes_table(results: Results) -> Table:
    """Changes that all rows share, by budget and data set; empty if there are none."""
    settings = results.settings
    named = [
        *((name, "budget", changes) for name, changes in settings.budgets.items()),
        *((name, "data set", entry.changes) for name, entry in settings.datasets.items()),
    ]
    lines = [[name, what, ", ".join(changes)] for name, what, changes in named if changes]
    return Table(["Name", "Of", "Changes"], lines)
