"""The records of a benchmark, in the order of its settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from solo_ext.config.check import result_settings
from solo_ext.core.files import read_jsonl
from solo_ext.lab.experiments.records import (
    RECORDS,
    SETTINGS,
    UNFINISHED,
    Record,
    read_records,
    settings_in,
    times_written,
)
from solo_ext.lab.experiments.settings import BenchmarkSettings

WHOSE = {"plugin": "solo_ext", "host": "solo-learn", "baseline": "baseline", "teacher": "teacher"}
"""Names of the kinds of rows in tables."""


@dataclass(frozen=True)
class Estimate:
    """Mean and sample deviation over seeds, and the mean's 95 % interval; null for one value.

    >>> estimate([2.0])
    Estimate(mean=2.0, deviation=None, low=None, high=None, count=1)
    """

    mean: float
    deviation: float | None
    low: float | None
    high: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, sample deviation, and ``mean ± t(0.975, n - 1) * deviation / sqrt(n)``.

    >>> found = estimate([2.0, 4.0, 1.0])
    >>> f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
    '2.33 (-1.46 to 6.13)'
    """
    count = len(values)
    if count == 0:
        return None
    mean = statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, None, None, 1)
    deviation = statistics.stdev(values)
    half = float(stats.t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
    return Estimate(mean, deviation, mean - half, mean + half, count)


class Place(NamedTuple):
    """Rows are compared within a place: one data set with one budget.

    >>> Place("digits", "default").dataset
    'digits'
    """

    dataset: str
    budget: str


class Results:
    """Records by data set, budget, row and seed.

    Args:
        settings: the benchmark.
        records: records of its runs; the attribute ``left_out`` names those that do not count.
        written: when each hypothesis was last changed; a hypothesis without a time stays undecided.
        unfinished: lines of ``unfinished.jsonl``; those of other rows do not count.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> Results(read_benchmark("demo"), []).places(empty=True)
    [Place(dataset='digits', budget='default')]
    """

    def __init__(
        self,
        settings: BenchmarkSettings,
        records: Iterable[Record],
        written: Mapping[str, str] | None = None,
        unfinished: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.settings, self.written = settings, dict(written or {})
        self._held: dict[tuple[Place, str], dict[int, Record]] = {}
        self.left_out: list[str] = []
        for record in sorted(records, key=lambda r: r["finished"]):
            place = Place(record["dataset"], record["budget"])
            row, seed = record["row"], record["seed"]
            by_seed = self._held.setdefault((place, row), {})
            named = place in self._named() and row in settings.rows
            known = named and seed in settings.seeds_of(row)
            if not known or seed in by_seed:
                self.left_out.append(f"{' '.join(place)} {row} {seed}")
            if known:
                by_seed[seed] = record
        self._held = {k: dict(sorted(v.items())) for k, v in self._held.items() if v}
        self.records = [r for by_seed in self._held.values() for r in by_seed.values()]
        self._unfinished = list(unfinished)
        measured = sorted({name for r in self.records for name in r["scores"]})
        self.measures = settings.headline or measured

    def _named(self) -> list[Place]:
        return [Place(d, b) for d in self.settings.datasets for b in self.settings.budgets]

    def places(self, *, empty: bool = False) -> list[Place]:
        """Data sets and budgets that have records (or none), in the order of the settings."""
        held = {place for place, _ in self._held}
        return [place for place in self._named() if (place in held) != empty]

    def title(self, place: Place) -> str:
        """The data set, and the budget if there is more than one."""
        one = len(self.settings.budgets) == 1
        return place.dataset if one else f"{place.dataset}, budget {place.budget}"

    def rows(self, place: Place) -> list[str]:
        """Rows that have records in the place, in the order of the settings."""
        return [name for name in self.settings.rows if (place, name) in self._held]

    def runs(self, place: Place, row: str) -> dict[int, Record]:
        """Records of a row by seed."""
        return self._held.get((place, row), {})

    def kind(self, place: Place, row: str) -> str:
        """``plugin``, ``host``, ``baseline`` or ``teacher``."""
        return next(iter(self.runs(place, row).values()))["kind"]

    def label(self, row: str) -> str:
        """Name of a row in tables."""
        return self.settings.rows[row].label or row

    def scores(self, place: Place, row: str, measure: str) -> dict[int, float]:
        """A score by seed, for seeds where it is finite."""
        found = {s: r["scores"].get(measure) for s, r in self.runs(place, row).items()}
        return {s: v for s, v in found.items() if v is not None and math.isfinite(v)}

    def mean(self, place: Place, row: str, measure: str) -> Estimate | None:
        """Estimate of a row's score over its seeds."""
        return estimate(list(self.scores(place, row, measure).values()))

    def difference(self, place: Place, row: str, base: str, measure: str) -> Estimate | None:
        """Estimate of ``row - base``, paired by the seeds for which both have the score."""
        above, below = (self.scores(place, name, measure) for name in (row, base))
        return estimate([above[seed] - below[seed] for seed in above if seed in below])

    def best(self, place: Place, measure: str) -> list[str]:
        """Rows with the highest mean, to two decimals, among those with the most seeds.

        Baselines and teachers are never the best.
        """
        found = {
            row: list(self.scores(place, row, measure).values())
            for row in self.rows(place)
            if self.kind(place, row) in ("plugin", "host")
        }
        most = max(map(len, found.values()), default=0)
        means = {
            row: round(statistics.fmean(values), 2)
            for row, values in found.items()
            if values and len(values) == most
        }
        return [row for row, mean in means.items() if mean == max(means.values())]

    def missing(self, place: Place) -> dict[str, list[int]]:
        """Seeds of the stages of a place without a record, by row.

        Which rows a stage with ``near`` has is known only when it is run, so its seeds do not
        count.
        """
        stages = [stage for stage in self.settings.every_stage() if stage.near is None]
        found = {}
        for name, row in self.settings.rows.items():
            taught = name == self.settings.teacher
            of_row = [
                s
                for s in stages
                if name in s.rows and place.budget == ((taught and s.teacher_budget) or s.budget)
            ]
            seeds = {seed for stage in of_row for seed in self.settings.seeds_of(name, stage)}
            held = self.runs(place, name)
            # Raw pixels do not depend on the seed: one run stands for all.
            whole = bool(held) and row.baseline == "raw-pixels"
            if not whole and (absent := sorted(seeds - held.keys())):
                found[name] = absent
        return found

    def unfinished(self, place: Place) -> list[Mapping[str, Any]]:
        """Lines of runs of the place that have begun and have no record."""
        return [
            line
            for line in self._unfinished
            if [line.get("dataset"), line.get("budget")] == [*place]
            # A list, because a damaged line may hold anything.
            and line.get("row") in list(self.settings.rows)
            and line.get("seed") not in list(self.runs(place, line["row"]))
        ]

    def curve(self, place: Place, row: str, measure: str) -> list[tuple[int, float, float]]:
        """Epochs, seconds of training and score; means over the seeds that have a curve.

        The points are the epochs that all of these seeds measured.
        """
        by_seed: list[dict[int, tuple[float, float]]] = []
        for record in self.runs(place, row).values():
            if (curves := record["curves"]) is not None:
                scores = curves["scores"].get(measure, ())
                points = zip(curves["epochs"], curves["seconds"], scores, strict=False)
                by_seed.append({e: (s, score) for e, s, score in points if score is not None})
        held = [points for points in by_seed if points]
        epochs = sorted(set.intersection(*map(set, held))) if held else []
        return [
            (e, statistics.fmean(p[e][0] for p in held), statistics.fmean(p[e][1] for p in held))
            for e in epochs
        ]

    def unlike(self, place: Place, row: str, base: str) -> list[str]:
        """Conditions that differ between two rows although a comparison needs them equal."""
        found = [_conditions(r) for name in (row, base) for r in self.runs(place, name).values()]
        if any(self.kind(place, n) == "baseline" for n in (row, base) if self.runs(place, n)):
            found = [{k: v for k, v in f.items() if k != "epochs"} for f in found]
        return [key for key in found[0] if any(f[key] != found[0][key] for f in found)]

    def differing(self, place: Place, *rows: str) -> list[str]:
        """Keys of the config that differ between the runs of rows."""
        first, *others = (r["config"] for row in rows for r in self.runs(place, row).values())
        return sorted({key for config in others for key in _differing_keys(first, config)})


def read_results(folder: Path) -> Results:
    """Reads the settings and records of a folder.

    Raises:
        UserError: one of the files is missing or has another format.
        ConfigError: invalid settings.

    >>> read_results(Path("nowhere"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: records 'nowhere': no records.jsonl in it; give a ...
    """
    file = folder / SETTINGS
    # A benchmark writes its settings first: without records, no run of it has ended yet.
    begun = file.is_file() and not (folder / RECORDS).is_file()
    records = [] if begun else read_records(folder)
    settings = settings_in(folder)
    unfinished = read_jsonl(folder / UNFINISHED)
    return Results(settings, records, times_written(settings, folder), unfinished)


def _differing_keys(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    first, second = (result_settings(given) for given in (config, other))
    # A null key means the same as a missing key, and earlier records lack some keys.
    found = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
    return [key for key in found if key not in ("seed", "name")]


def _conditions(record: Record) -> dict[str, Any]:
    host = record["environment"]["host"]
    return {
        "evaluation": record["evaluation"],
        "threads": record["threads"],
        "host": f"{host['generation']}, {host['fingerprint']}",
        "images": record["images"],
        "epochs": record["epochs"],
    }
