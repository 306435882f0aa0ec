"""The records of a benchmark, in the order of its settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import UserError
from solo_ext.lab.experiments.records import SETTINGS, Record, read_records, times_written
from solo_ext.lab.experiments.settings import BenchmarkSettings, settings_of


class Place(NamedTuple):
    """Rows are compared within a place: one data set with one budget."""

    dataset: str
    budget: str


class Results:
    """Records by data set, budget, row and seed.

    Args:
        settings: the benchmark.
        records: of its runs; the sentences of ``left_out`` say which ones do not count.
        written: when each hypothesis was last changed; one without a time stays undecided.

    Attributes:
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
        strange, replaced = [], []
        for record in sorted(records, key=lambda r: r["finished"]):
            place = Place(record["dataset"], record["budget"])
            row, seed = record["row"], record["seed"]
            known = place in self._named() and row in settings.rows
            if not known or seed not in settings.seeds_of(row):
                strange.append(f"{' '.join(place)} {row} {seed}")
                continue
            by_seed = self._held.setdefault((place, row), {})
            if seed in by_seed:
                replaced.append(f"{row} {seed}")
            by_seed[seed] = record
        self._held = {k: dict(sorted(v.items())) for k, v in self._held.items()}
        self.left_out = []
        if strange:
            names = ", ".join(strange)
            self.left_out.append(f"Left out, because the settings do not name them: {names}.")
        if replaced:
            names = ", ".join(replaced)
            self.left_out.append(f"Left out, because a later run had other settings: {names}.")
        self.records = [r for by_seed in self._held.values() for r in by_seed.values()]
        self.measures = settings.headline or self._measured()

    def _named(self) -> list[Place]:
        return [Place(d, b) for d in self.settings.datasets for b in self.settings.budgets]

    def _measured(self) -> list[str]:
        """Every score that a record has, in the order of the protocols."""
        found = sorted({name for r in self.records for name in r["scores"]})
        protocols = list(self.settings.evaluation)
        return sorted(
            found, key=lambda name: [not name.startswith(protocol) for protocol in protocols]
        )

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

    def best(self, place: Place, measure: str) -> list[str]:
        """Rows with the highest mean of those with the most seeds; equal if printed alike.

        Baselines and teachers are never the best.
        """
        found = {
            row: list(self.scores(place, row, measure).values())
            for row in self.rows(place)
            if self.kind(place, row) in ("plugin", "host")
        }
        most = max(map(len, found.values()), default=0)
        shown = {
            row: f"{statistics.fmean(values):.2f}"
            for row, values in found.items()
            if values and len(values) == most
        }
        highest = max(shown.values(), key=float, default="")
        return [row for row, text in shown.items() if text == highest]

    def missing(self, place: Place) -> dict[str, list[int]]:
        """Seeds of the settings without a record, by row."""
        found = {}
        expected = self.settings.default_rows
        for name, row in self.settings.rows.items():
            held = self.runs(place, name)
            if not held and expected is not None and name not in expected:
                continue
            # Raw pixels do not depend on the seed: one run stands for all.
            if row.baseline == "raw-pixels" and held:
                continue
            if absent := [s for s in self.settings.seeds_of(name) if s not in held]:
                found[name] = absent
        return found

    def curve(self, place: Place, row: str, measure: str) -> list[tuple[int, float, float]]:
        """Epochs, seconds of training and score; means over the seeds that have a curve.

        Only epochs that all of these seeds measured are points.
        """
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
        epochs = sorted(set.intersection(*map(set, held))) if held else []
        return [
            (e, statistics.fmean(p[e][0] for p in held), statistics.fmean(p[e][1] for p in held))
            for e in epochs
        ]

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

    def unlike(self, place: Place, row: str, base: str) -> list[str]:
        """Conditions that differ between two rows although a comparison needs them equal."""
        found = [_conditions(r) for name in (row, base) for r in self.runs(place, name).values()]
        if any(self.kind(place, n) == "baseline" for n in (row, base) if self.runs(place, n)):
            found = [{k: v for k, v in f.items() if k != "epochs"} for f in found]
        return [key for key in found[0] if any(f[key] != found[0][key] for f in found)]

    def differing(self, place: Place, row: str) -> list[str]:
        """Sections of the config that differ between the seeds of a row."""
        first, *others = (r["config"] for r in self.runs(place, row).values())
        own = ("seed", "name", "checkpoint", "loggers", "wandb")
        return [
            key
            for key in sorted({k for config in (first, *others) for k in config} - {*own})
            if any(config.get(key) != first.get(key) for config in others)
        ]


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
