"""Running a benchmark: what is missing is run, what is finished is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from solo_ext.benchmark.launchers.base import Launcher, Outcome
from solo_ext.benchmark.plan import PlannedRun
from solo_ext.benchmark.records import (
    LOCK,
    RECORDS,
    SETTINGS,
    Record,
    append_records,
    read_records,
)
from solo_ext.benchmark.settings import BenchmarkSettings
from solo_ext.benchmark.work import PLANNED, RECORD
from solo_ext.locks import locked
from solo_ext.paths import write_text

RUNS = "runs"
Watch = Callable[[Path, Mapping[str, Record]], None]
"""Called with the folder of the run directories, and the records by key."""


@dataclass(frozen=True)
class BenchmarkResult:
    """What a call leaves.

    Attributes:
        records: of all planned runs that are finished, in the order of the plan.
        failed: runs of this call without a record.
    """

    records: list[Record]
    failed: list[Outcome]


def run_benchmark(
    settings: BenchmarkSettings,
    plan: Sequence[PlannedRun],
    out: Path,
    launcher: Launcher,
    watch: Watch | None = None,
) -> BenchmarkResult:
    """Runs what has no record yet.

    Records are added to ``records.jsonl`` as runs finish. A call that was stopped, in whatever
    way, is repeated: finished runs stay, unfinished ones go on from their last checkpoint.

    Args:
        settings: the benchmark.
        plan: of :func:`solo_ext.benchmark.plan.make_plan`.
        out: folder of records and run directories.
        launcher: starts the runs.
        watch: called about twice a second.

    Raises:
        UserError: another call is at work in the folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK, 0):
        dumped = settings.model_dump(exclude_defaults=True)
        write_text(out / SETTINGS, yaml.safe_dump(dumped, sort_keys=False))
        # What a killed call left, of other rows too.
        held = {r["key"]: r for r in _held(out)}
        _collect(out, held, [f.name for f in (out / RUNS).glob("*/")])
        planned = [run.folder for run in plan]

        def tick() -> None:
            _collect(out, held, planned)
            if watch is not None:
                watch(out / RUNS, held)

        tick()
        # Two rows may be alike.
        missing = {run.folder: run for run in plan if run.key not in held}
        places = {name: _place(run, out) for name, run in missing.items()}
        needs = {
            places[name]: places[run.teacher]
            for name, run in missing.items()
            if run.teacher in places
        }
        failed = launcher.run(list(places.values()), needs, tick)
        return BenchmarkResult([held[run.key] for run in plan if run.key in held], failed)


def _place(run: PlannedRun, out: Path) -> Path:
    folder = out / RUNS / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PLANNED, run.to_json())
    return folder.absolute()


def _held(out: Path) -> list[Record]:
    return read_records(out) if (out / RECORDS).is_file() else []


def _collect(out: Path, held: dict[str, Record], folders: Sequence[str]) -> None:
    """Adds the records of run directories that are not among ``held``."""
    fresh: dict[str, Record] = {}
    for name in folders:
        key, file = name.rpartition("-")[2], out / RUNS / name / RECORD
        if key not in held and file.is_file():
            fresh[key] = json.loads(file.read_text())
    if fresh:
        append_records(out, fresh.values())
        held |= fresh
