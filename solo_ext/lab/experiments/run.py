"""Runs a benchmark: only runs without a record are done."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from solo_ext.config.untrusted import read_yaml
from solo_ext.core.errors import StoppedBySignal, UserError
from solo_ext.core.files import locked, write_text
from solo_ext.lab.experiments.launchers import Launcher, Outcome
from solo_ext.lab.experiments.plan import PlannedRun
from solo_ext.lab.experiments.records import (
    RECORDS,
    SETTINGS,
    Record,
    append_records,
    note_claims,
    read_records,
)
from solo_ext.lab.experiments.settings import BenchmarkSettings, settings_of
from solo_ext.lab.experiments.work import EPOCHS, PLANNED, RECORD, read_epochs
from solo_ext.lab.training.run_dir import checkpoints
from solo_ext.lab.training.signals import StopSignals

LOCK, RUNS = ".lock", "runs"
Watch = Callable[[Path, Mapping[str, Record]], None]
"""Called with the folder of the run directories, and the records by key."""


@dataclass(frozen=True)
class BenchmarkResult:
    """Result of a call.

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
    """Does the runs that have no record yet.

    Records are added to ``records.jsonl`` as runs finish. A call that was stopped for any reason
    can be repeated: finished runs are kept; unfinished ones continue from their last checkpoint.

    Args:
        settings: the benchmark.
        plan: from :func:`solo_ext.lab.experiments.plan.make_plan`.
        out: folder of records and run directories.
        launcher: starts the runs.
        watch: called about twice a second.

    Raises:
        UserError: another call is using the folder, it belongs to another benchmark, or it cannot
            be written.
        StoppedBySignal: a signal ended the call and its current runs, which saved first.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {str(out)!r}: {error.strerror}; name a folder that can be written"
        ) from error
    answer = "Ctrl-C: runs at work save first, which may take a while"
    with locked(out / LOCK, 0), StopSignals(answer) as signals:
        settings = _joined(settings, out)
        dumped = settings.model_dump(exclude_defaults=True)
        write_text(out / SETTINGS, yaml.safe_dump(dumped, sort_keys=False))
        note_claims(settings, out)
        # An earlier call may have been killed after a run ended but before it was recorded.
        records = read_records(out) if (out / RECORDS).is_file() else []
        held = {record["key"]: record for record in records}
        _collect(out, held, [f.name for f in (out / RUNS).glob("*/")])
        _rename(out, held, plan)
        planned = [run.folder for run in plan]

        def tick() -> None:
            _collect(out, held, planned)
            if watch is not None:
                watch(out / RUNS, held)
            if signals.received is not None:
                raise StoppedBySignal(
                    f"stopped by {signals.received.name}; what is finished stays, and the same "
                    "command goes on",
                    signals.received,
                )

        tick()
        missing = {run.folder: run for run in plan if run.key not in held}
        taught_by = {run.teacher for run in missing.values()}
        # Retrain a teacher whose record was copied to this folder without its checkpoint.
        missing |= {
            run.folder: run
            for run in plan
            if run.folder in taught_by and not checkpoints(out / RUNS / run.folder)
        }
        places = {name: _place(run, out) for name, run in missing.items()}
        needs = {
            places[name]: places[run.teacher]
            for name, run in missing.items()
            if run.teacher in places
        }
        failed = launcher.run(list(places.values()), needs, tick)
        return BenchmarkResult([held[run.key] for run in plan if run.key in held], failed)


def _joined(settings: BenchmarkSettings, out: Path) -> BenchmarkSettings:
    """Settings that also keep the seeds of runs that the folder already has.

    Raises:
        UserError: the folder belongs to another benchmark.
    """
    file = out / SETTINGS
    if not file.is_file():
        return settings
    before = settings_of(read_yaml(file))
    if before.title != settings.title:
        raise UserError(
            f"--out {str(out)!r} holds the benchmark {before.title!r}, not "
            f"{settings.title!r}; name another folder"
        )
    return settings.model_copy(update={"seeds": sorted({*before.seeds, *settings.seeds})})


def _rename(out: Path, held: dict[str, Record], plan: Sequence[PlannedRun]) -> None:
    """Renames the rows in records of rows whose name has changed."""
    renamed: list[Record] = [
        {**held[run.key], "row": run.row}
        for run in plan
        if run.key in held and held[run.key]["row"] != run.row
    ]
    if renamed:
        append_records(out, renamed)
        held |= {record["key"]: record for record in renamed}


def _place(run: PlannedRun, out: Path) -> Path:
    folder = out / RUNS / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PLANNED, run.to_json())
    return folder.absolute()


def _collect(out: Path, held: dict[str, Record], folders: Sequence[str]) -> None:
    """Adds records of run directories that are missing in ``held``."""
    fresh: dict[str, Record] = {}
    for name in folders:
        key, file = name.rpartition("-")[2], out / RUNS / name / RECORD
        if key not in held and file.is_file():
            fresh[key] = _read(file)
    if fresh:
        append_records(out, fresh.values())
        held |= fresh


def _read(file: Path) -> Record:
    try:
        record: Record = json.loads(file.read_text())
        return {**record, "key": record["key"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{str(file)!r}: not a record of a run; remove it") from None


class Progress:
    """Prints a line for every finished run; on a terminal it also shows runs in progress.

    Args:
        plan: all runs.
        console: where to print.
    """

    def __init__(self, plan: Sequence[PlannedRun], console: Console) -> None:
        self.plan, self.console = plan, console
        self._status = console.status("starting")
        self._known: set[str] | None = None

    def __enter__(self) -> Progress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, runs: Path, records: Mapping[str, Record]) -> None:
        """Checks the run directories again."""
        done = {run.key for run in self.plan if run.key in records}
        if self._known is None:
            if done:
                self._print(f"{len(done)} of {len(self.plan)} runs were finished before")
            self._known = done
        for run in self.plan:
            if run.key in done - self._known:
                self._known.add(run.key)
                numbers = "  ".join(f"{k} {v:.2f}" for k, v in records[run.key]["scores"].items())
                self._print(f"{len(self._known)}/{len(self.plan)}  {_name(run)}  {numbers}")
        at_work = [
            f"{_name(run)}: epoch {epochs} of {run.config.get('max_epochs')}"
            for run in self.plan
            if run.key not in done and (epochs := len(read_epochs(runs / run.folder / EPOCHS)))
        ]
        count = f"{len(done)} of {len(self.plan)} runs"
        self._status.update(Text("; ".join([count, *at_work])))

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


def _name(run: PlannedRun) -> str:
    return f"{run.dataset} {run.budget} {run.row} seed {run.seed}"
