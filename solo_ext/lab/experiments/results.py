"""The records of a benchmark, in the order of its settings."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import UserError
from solo_ext.lab.experiments.records import SETTINGS, Record, read_records, times_written
from solo_ext.lab.experiments.settings import BenchmarkSettings, settings_of

_OF_A_RUN = ("seed", "name", "path", "dir")
"""Config keys with these endings may differ between the seeds of a row."""


class Place(NamedTuple):
    """Rows are compared within a place: one data set with one budget."""

    dataset: str
    budget: str


class CurvePoint(NamedTuple):
    """Mean over seeds of a score after some epochs, and of the seconds of training until then."""

    epoch: int
    seconds: float
    score: float


class Results:
    """Records by data set, budget, row and seed.

    Args:
        settings: the benchmark.
        records: of its runs; records of other runs are left out.
        written: when each hypothesis was last changed; one without a time stays undecided.

    Attributes:
        settings: of the benchmark.
        records: those that the settings name, one for each place, row and seed.
        written: as given.
        left_out: what was left out and why, one sentence each.
        measures: names of scores in the order of the table.
    """

    def __init__(
        self,
        settings: BenchmarkSettings,
        records: Iterable[Record],
        written: Mapping[str, str] | None = None,
    ) -> None:
        self.settings, self.written = settings, dict(written or {})
        self._held: dict[tuple[Place, str], dict[int, Record]] = {}
        self._keep(records)
        self.records = [r for by_seed in self._held.values() for r in by_seed.values()]
        self.measures = settings.headline or self.all_measures()

    def all_measures(self) -> list[str]:
        """Every score that a record has: the headline's first, then by protocol and name."""
        found = {name for r in self.records for name in r["scores"]}
        first = self.settings.headline or []
        protocols = list(self.settings.evaluation)

        def order(name: str) -> tuple[int, int, str]:
            protocol = next((i for i, p in enumerate(protocols) if name.startswith(p)), 999)
            return (first.index(name) if name in first else len(first), protocol, name)

        return sorted(found, key=order)

    def places(self, *, empty: bool = False) -> list[Place]:
        """Data sets and budgets that have records (or none), in the order of the settings."""
        held = {place for place, _ in self._held}
        named = [Place(d, b) for d in self.settings.datasets for b in self.settings.budgets]
        return [place for place in named if (place in held) != empty]

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

    def ranked(self, place: Place) -> list[str]:
        """Rows that are ranked: trained with the budget, and not a reference."""
        return [
            name
            for name in self.rows(place)
            if self.kind(place, name) in ("plugin", "host")
            and not self.settings.rows[name].reference
        ]

    def label(self, row: str) -> str:
        """Name of a row in tables."""
        return self.settings.rows[row].label or row

    def scores(self, place: Place, row: str, measure: str) -> dict[int, float]:
        """A score by seed, for seeds where it is finite."""
        found = {s: r["scores"].get(measure) for s, r in self.runs(place, row).items()}
        return {s: v for s, v in found.items() if v is not None and math.isfinite(v)}

    def missing(self, place: Place) -> dict[str, list[int]]:
        """Seeds of the settings without a record, by row."""
        found = {}
        expected = self.settings.default_rows
        for name in self.settings.rows:
            held = self.runs(place, name)
            if not held and expected is not None and name not in expected:
                continue
            # Raw pixels do not depend on the seed: one run stands for all.
            if self.settings.rows[name].baseline == "raw-pixels" and held:
                continue
            absent = [s for s in self._seeds(name) if s not in held]
            if absent:
                found[name] = absent
        return found

    def curve(self, place: Place, row: str, measure: str) -> list[CurvePoint]:
        """Mean over the seeds that have a curve, at the epochs that all of them measured."""
        held = [
            {
                epoch: (seconds, score)
                for epoch, seconds, score in zip(
                    c["epochs"], c["seconds"], c["scores"].get(measure, ()), strict=False
                )
                if score is not None and math.isfinite(score) and math.isfinite(seconds)
            }
            for r in self.runs(place, row).values()
            if (c := r["curves"]) is not None
        ]
        held = [points for points in held if points]
        if not held:
            return []
        return [
            CurvePoint(
                epoch,
                statistics.fmean(points[epoch][0] for points in held),
                statistics.fmean(points[epoch][1] for points in held),
            )
            for epoch in sorted(set.intersection(*(set(points) for points in held)))
        ]

    def curve_seeds(self, place: Place, row: str, measure: str) -> int:
        """Number of seeds that a curve averages."""
        return sum(
            any(v is not None and math.isfinite(v) for v in c["scores"].get(measure, ()))
            for r in self.runs(place, row).values()
            if (c := r["curves"]) is not None
        )

    def losses(self, place: Place, row: str) -> dict[str, list[tuple[int, float]]]:
        """Mean over seeds of every loss, at the epochs (from 1) where all of them are finite."""
        held = [r.get("losses", {}) for r in self.runs(place, row).values()]
        found = {}
        for name in sorted({name for losses in held for name in losses}):
            epochs = zip(*(losses[name] for losses in held if name in losses), strict=False)
            points = [
                (epoch, statistics.fmean(v for v in values if v is not None))
                for epoch, values in enumerate(epochs, 1)
                if None not in values
            ]
            if points:
                found[name] = points
        return found

    def differing(self, place: Place, row: str) -> list[str]:
        """Keys of the config and the evaluation that differ between the seeds of a row."""
        flat = [
            dict(_flat({**_conditions(r), **r["config"]})) for r in self.runs(place, row).values()
        ]
        keys = sorted({key for config in flat for key in config})
        return [
            key
            for key in keys
            if not key.rpartition(".")[2].endswith(_OF_A_RUN)
            and any(config.get(key) != flat[0].get(key) for config in flat)
        ]

    def unlike(self, place: Place, row: str, base: str) -> list[str]:
        """Conditions that differ between two rows although a comparison needs them equal."""
        found = [_conditions(r) for name in (row, base) for r in self.runs(place, name).values()]
        if any(self.kind(place, n) == "baseline" for n in (row, base) if self.runs(place, n)):
            found = [{k: v for k, v in f.items() if k != "epochs"} for f in found]
        return [key for key in found[0] if any(f[key] != found[0][key] for f in found)]

    def commits(self) -> list[str]:
        """Commits of the plugin in the records; one with local changes counts separately."""
        codes = [r["code"] for r in self.records]
        return sorted({_commit(code) for code in codes})

    def _seeds(self, row: str) -> list[int]:
        if row == self.settings.teacher:
            return [self.settings.teacher_seed]
        return self.settings.seeds

    def _keep(self, records: Iterable[Record]) -> None:
        left_out: dict[str, Counter[str]] = defaultdict(Counter)
        known: dict[str, Container[str]] = {
            "row": self.settings.rows,
            "dataset": self.settings.datasets,
            "budget": self.settings.budgets,
        }
        for record in sorted(records, key=lambda r: r["finished"]):
            place, row = Place(record["dataset"], record["budget"]), record["row"]
            named = {"row": row, "dataset": place.dataset, "budget": place.budget}
            strange = next((what for what in known if named[what] not in known[what]), None)
            if strange is not None:
                words = strange.replace("dataset", "data set")
                left_out[f"the settings name no such {words}"][named[strange]] += 1
            elif record["seed"] not in self._seeds(row):
                left_out["of seeds that the settings do not name"][row] += 1
            else:
                by_seed = self._held.setdefault((place, row), {})
                if record["seed"] in by_seed:
                    left_out[
                        "another run of the same row and seed finished later, with other settings"
                    ][row] += 1
                by_seed[record["seed"]] = record
        self._held = {k: dict(sorted(v.items())) for k, v in self._held.items()}
        self.left_out = [f"Left out, {why}: {_listed(counts)}." for why, counts in left_out.items()]


def read_results(folder: Path) -> Results:
    """Reads the settings and records of a folder.

    Raises:
        UserError: one of the files is missing or has another format.
        ConfigError: invalid settings.
    """
    records = read_records(folder)
    file = folder / SETTINGS
    try:
        given = read_yaml(file)
    except FileNotFoundError:
        raise UserError(
            f"records {str(folder)!r}: no {SETTINGS} in it; give a folder that "
            "`solo-ext benchmark run` wrote"
        ) from None
    if not isinstance(given, Mapping):
        raise UserError(f"{file}: holds no settings; run the benchmark again")
    settings = settings_of(given)
    return Results(settings, records, times_written(settings, folder))


def _conditions(record: Record) -> dict[str, Any]:
    """Conditions that all runs of a comparison must share."""
    host = record["environment"]["host"]
    return {
        "evaluation": record["evaluation"],
        "threads": record["threads"],
        "host": f"{host['generation']}, {host.get('fingerprint')}",
        "images": record["images"],
        "epochs": record["epochs"],
    }


def _commit(code: Mapping[str, Any]) -> str:
    commit = str(code.get("commit", code["version"]))[:10]
    return f"{commit} with changes" if code.get("changed") else commit


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} ({count} {'record' if count == 1 else 'records'})"
        for name, count in sorted(counts.items())
    )


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        for place, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}.{place}")
    else:
        yield prefix, value
