"""The tables of one data set and budget."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from solo_ext.lab.experiments.records import Record
from solo_ext.lab.experiments.reporting.blocks import Table
from solo_ext.lab.experiments.reporting.reported import PublishedNumber
from solo_ext.lab.experiments.reporting.results import Place, Results
from solo_ext.lab.experiments.reporting.statistics import estimate, mean_ranks, paired_differences
from solo_ext.lab.experiments.reporting.wording import (
    DASH,
    gibibytes,
    mean_and_deviation,
    mean_and_interval,
    whole,
)

WHOSE = {
    "plugin": "solo_ext",
    "host": "solo-learn",
    "baseline": "baseline",
    "teacher": "teacher",
}
PUBLISHED = {"knn_top1": "kNN", "linear_top1": "linear", "finetune_top1": "fine-tuned"}
"""Columns of the published numbers that stand beside measured ones."""
_TELLS_APART = ("method", "backbone", "batch", "epochs")


def scores_table(results: Results, place: Place, numbers: Sequence[PublishedNumber]) -> Table:
    """A line for each row: scores, rank, cost, and what others published of the same method."""
    rows, measures = results.rows(place), results.measures
    ranks = place_ranks(results, place)
    cuda = any(_memory(r, "cuda") for row in rows for r in results.runs(place, row).values())
    beside = published_columns(results, place, numbers)
    lines = []
    for row in rows:
        held = list(results.runs(place, row).values())
        lines.append(
            [
                results.label(row),
                WHOSE[results.kind(place, row)],
                _seeds(results, place, row),
                *(
                    mean_and_deviation(
                        estimate(list(results.scores(place, row, measure).values())), len(held)
                    )
                    for measure in measures
                ),
                f"{ranks[row]:.1f}" if row in ranks else DASH,
                whole(mean_of(held, seconds_of)),
                whole(mean_of(held, speed_of)),
                gibibytes(peak_of(held, "resident")),
                *([gibibytes(peak_of(held, "cuda"))] if cuda else ()),
                *(column.get(row, DASH) for column in beside.values()),
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
        *beside,
    ]
    return Table(
        head,
        lines,
        numeric=frozenset(range(2, len(head) - len(beside))),
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
            if not results.runs(place, base):
                continue
            pairs = len(results.runs(place, row).keys() & results.runs(place, base).keys())
            lines.append(
                [
                    f"{results.label(row)} minus {results.label(base)}",
                    str(pairs),
                    *(
                        mean_and_interval(
                            estimate(
                                list(
                                    paired_differences(
                                        results.scores(place, row, measure),
                                        results.scores(place, base, measure),
                                    ).values()
                                )
                            ),
                            pairs,
                        )
                        for measure in results.measures
                    ),
                ]
            )
    head = ["Difference", "Pairs", *results.measures]
    return Table(head, lines, numeric=frozenset(range(1, len(head))))


def published_table(numbers: Sequence[PublishedNumber]) -> Table:
    """Published numbers as they were published."""
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
        folded=f"{len(numbers)} reported numbers and their sources",
    )


def published_columns(
    results: Results, place: Place, numbers: Sequence[PublishedNumber]
) -> dict[str, dict[str, str]]:
    """Published numbers of a row's method by heading and row; rows with changes have none."""
    columns: dict[str, dict[str, str]] = {}
    for library in dict.fromkeys(n.library for n in numbers):
        for field, name in PUBLISHED.items():
            found = {}
            for row in results.rows(place):
                method = next(iter(results.runs(place, row).values()))["method"]
                same = [
                    n
                    for n in numbers
                    if n.library == library and n.registered == method and getattr(n, field)
                ]
                if same and not results.settings.rows[row].changes:
                    found[row] = _joined(same, field)
            if found:
                columns[f"reported by {library}: {name}"] = found
    return columns


def place_ranks(results: Results, place: Place) -> dict[str, float]:
    """Mean ranks of the rows that compete and have the most seeds, by the first measure."""
    first = results.measures[0] if results.measures else ""
    return mean_ranks(full_rows(results, place, first))


def full_rows(results: Results, place: Place, measure: str) -> dict[str, dict[int, float]]:
    """Scores by seed of the rows that compete, of those with the most seeds."""
    found = {row: results.scores(place, row, measure) for row in results.ranked(place)}
    most = max((len(by_seed) for by_seed in found.values()), default=0)
    return {row: by_seed for row, by_seed in found.items() if by_seed and len(by_seed) == most}


def best_rows(results: Results, place: Place, measure: str) -> list[str]:
    """Rows of the highest mean among :func:`full_rows`; means that print alike are equally high."""
    full = full_rows(results, place, measure)
    shown = {row: f"{statistics.fmean(scores.values()):.2f}" for row, scores in full.items()}
    highest = max(shown.values(), key=float, default="")
    return [row for row, text in shown.items() if text == highest]


def seconds_of(record: Record) -> float | None:
    """Of training."""
    return record["seconds"]


def speed_of(record: Record) -> float | None:
    """Images per second of training."""
    return record["images_per_second"]


def mean_of(records: Sequence[Record], value: Callable[[Record], float | None]) -> float | None:
    """Mean of a cost over the runs that have it."""
    held = [v for record in records if (v := value(record)) is not None]
    return statistics.fmean(held) if held else None


def peak_of(records: Sequence[Record], where: str) -> int | None:
    """The highest peak over runs, in bytes."""
    return max((v for record in records if (v := _memory(record, where))), default=None)


def _memory(record: Record, where: str) -> int | None:
    memory = record["memory"]
    if memory is None:
        return None
    return memory["cuda"] if where == "cuda" else memory["resident"]


def _seeds(results: Results, place: Place, row: str) -> str:
    held = len(results.runs(place, row))
    absent = len(results.missing(place).get(row, ()))
    return f"{held} of {held + absent}" if absent else str(held)


def _joined(numbers: Sequence[PublishedNumber], field: str) -> str:
    """Several numbers of one method, each with what tells it from the others."""
    differing = [k for k in _TELLS_APART if len({getattr(n, k) for n in numbers}) > 1]

    def told(number: PublishedNumber) -> str:
        words = []
        for key in differing:
            value = getattr(number, key)
            words.append(
                {"batch": f"batch {value}", "epochs": f"{value} epochs"}.get(key, value)
                if value
                else f"{key} unknown"
            )
        score: str = getattr(number, field)
        return f"{score} ({', '.join(words)})" if words else score

    return "; ".join(dict.fromkeys(told(n) for n in numbers))
