"""The report as CSV: every number, unrounded."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from solo_ext.lab.experiments.reporting.results import Place, Results
from solo_ext.lab.experiments.reporting.sections import published_numbers
from solo_ext.lab.experiments.reporting.statistics import Estimate, estimate, paired_differences
from solo_ext.lab.experiments.reporting.tables import (
    mean_of,
    peak_of,
    place_ranks,
    published_columns,
    seconds_of,
    speed_of,
)


def render_csv(found: Iterable[tuple[str, Results]]) -> str:
    """One line for each data set, budget and row of each benchmark, by its name.

    ``<measure>_interval`` is half the width of the mean's 95 % interval;
    ``minus <base>: <measure>`` is of the differences paired by seed.
    """
    lines = [
        {"benchmark": name, **_line(results, place, row)}
        for name, results in found
        for place in results.places()
        for row in results.rows(place)
    ]
    # Columns that only some rows have come after those of all, in the order of their first use.
    head = list(dict.fromkeys(key for line in lines for key in line))
    head.sort(key=lambda key: (key.startswith("reported "), key.startswith("minus ")))
    text = io.StringIO()
    writer = csv.DictWriter(text, head, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _line(results: Results, place: Place, row: str) -> dict[str, Any]:
    runs = results.runs(place, row)
    held = list(runs.values())
    line: dict[str, Any] = {
        "dataset": place.dataset,
        "budget": place.budget,
        "row": row,
        "label": results.label(row),
        "kind": results.kind(place, row),
        "method": held[0]["method"],
        "seeds": len(held),
        "seeds_run": _joined(runs),
        "seeds_missing": _joined(results.missing(place).get(row, ())),
        "epochs": _joined(sorted({r["epochs"] for r in held})),
        "images": _joined(sorted({r["images"] for r in held})),
        "mean_rank": place_ranks(results, place).get(row),
        "seconds": mean_of(held, seconds_of),
        "images_per_second": mean_of(held, speed_of),
        "peak_memory_bytes": peak_of(held, "resident"),
        "peak_gpu_memory_bytes": peak_of(held, "cuda"),
    }
    for measure in dict.fromkeys((*results.measures, *results.all_measures())):
        scores = results.scores(place, row, measure)
        line |= _estimate(measure, estimate(list(scores.values())))
        line[f"{measure}_by_seed"] = _by_seed(scores)
    for base in results.settings.rows[row].bases:
        for measure in results.measures:
            differences = paired_differences(
                results.scores(place, row, measure), results.scores(place, base, measure)
            )
            if differences:
                found = estimate(list(differences.values()))
                line |= _estimate(f"minus {base}: {measure}", found)
    columns = published_columns(results, place, published_numbers(results, place))
    return line | {heading: column[row] for heading, column in columns.items() if row in column}


def _estimate(name: str, found: Estimate | None) -> dict[str, Any]:
    return {
        f"{name}_mean": found and found.mean,
        f"{name}_deviation": found and found.deviation,
        f"{name}_interval": found and found.half,
        f"{name}_count": found.count if found else 0,
    }


def _joined(values: Iterable[int] | Sequence[int]) -> str:
    return " ".join(map(str, values))


def _by_seed(scores: Mapping[int, float]) -> str:
    return " ".join(f"{seed}:{value!r}" for seed, value in scores.items())
