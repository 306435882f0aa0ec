"""Runs a benchmark, but only those of its runs that have no record yet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from solo_ext.core.errors import StoppedBySignal, UserError
from solo_ext.core.files import append_lines, locked, read_json, write_text
from solo_ext.lab.experiments.launchers import Launcher
from solo_ext.lab.experiments.plan import PlannedRun
from solo_ext.lab.experiments.records import (
    RECORDS,
    SETTINGS,
    UNFINISHED,
    Record,
    note_hypotheses,
    read_records,
    settings_in,
)
from solo_ext.lab.experiments.settings import BenchmarkSettings
from solo_ext.lab.experiments.work import CODE, PLANNED, RECORD
from solo_ext.lab.training.run_dir import checkpoints
from solo_ext.lab.training.signals import StopSignals

LOCK, RUNS = ".lock", "runs"


def run_benchmark(
    settings: BenchmarkSettings,
    plan: Sequence[PlannedRun],
    out: Path,
    launcher: Launcher,
    say: Callable[[str], object] = lambda _: None,
) -> tuple[list[Record], dict[str, str]]:
    """Executes the runs that have no record yet; students run after their teachers.

    Records are added to ``records.jsonl`` as runs finish. A call that was stopped for any reason
    can be repeated: finished runs are kept; unfinished ones continue from their last checkpoint,
    and ``unfinished.jsonl`` says how far they came.

    Returns:
        The records of all planned runs that are finished, in the order of the plan; the reasons
        of the runs that failed, by the names of their run directories.

    Raises:
        UserError: another call is using the folder, it belongs to another benchmark, or it cannot
            be written.
        StoppedBySignal: a signal ended the call and its current runs, which saved first.

    >>> import tempfile
    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> def launcher(folders, tick):
    ...     return {}  # the reason of each run that failed
    >>> out = Path(tempfile.mkdtemp())
    >>> run_benchmark(read_benchmark("demo"), [], out, launcher)
    ([], {})
    >>> sorted(file.name for file in out.iterdir())
    ['.lock', 'benchmark.yaml', 'hypotheses.jsonl']
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.strerror}; name a folder that can be written"
        raise UserError(f"--out {str(out)!r}: {why}") from error
    answer = "Ctrl-C: runs at work save first, which may take a while"
    with locked(out / LOCK, 0), StopSignals(answer) as signals:
        settings = _with_earlier_seeds(settings, out)
        dumped = settings.model_dump(exclude_defaults=True)
        write_text(out / SETTINGS, yaml.safe_dump(dumped, sort_keys=False))
        note_hypotheses(settings, out)
        known = read_records(out) if (out / RECORDS).is_file() else []
        held = {record["key"]: record for record in known}
        planned = {run.key for run in plan}

        def tick() -> None:
            fresh = _collect(out, plan, held)
            for done, record in enumerate(fresh, len(held.keys() & planned) - len(fresh) + 1):
                numbers = "  ".join(f"{k} {v:.2f}" for k, v in record["scores"].items())
                name = "{dataset} {budget} {row} seed {seed}".format(**record)
                say(f"{done}/{len(plan)}  {name}  {numbers}")
            if signals.received is not None:
                raise StoppedBySignal(
                    f"stopped by {signals.received.name}; what is finished stays, and the same "
                    "command goes on",
                    signals.received,
                )

        # An earlier call may have been killed after a run ended but before it was recorded.
        _collect(out, plan, held)
        _relabel(out, plan, held)
        if before := held.keys() & planned:
            say(f"{len(before)} of {len(plan)} runs were finished before")
        missing = {run.folder: run for run in plan if run.key not in held}
        taught_by = {run.teacher for run in missing.values()}
        for run in plan:
            folder = out / RUNS / run.folder
            # Train a teacher again, or to its end, if only its record is here, as where that was
            # copied or a call that trained it again was stopped.
            if run.folder in taught_by and not (
                checkpoints(folder) and (folder / RECORD).is_file()
            ):
                (folder / RECORD).unlink(missing_ok=True)
                missing[run.folder] = run
        places = {name: (out / RUNS / name).absolute() for name in missing}
        for name, folder in places.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / PLANNED, json.dumps(asdict(missing[name]), indent=1))
        alone = [run for run in missing.values() if run.teacher not in missing]
        students = [run for run in missing.values() if run.teacher in missing]
        try:
            failed = launcher([places[run.folder] for run in alone], tick)
            # A teacher that a time limit kept from its end has neither failed nor a record.
            taught = [r for r in students if (places[str(r.teacher)] / RECORD).is_file()]
            if taught:
                failed |= launcher([places[run.folder] for run in taught], tick)
        finally:
            _note_unfinished(out)
        reasons = {folder.name: reason for folder, reason in failed.items()}
        reasons |= {
            run.folder: f"its teacher {run.teacher} failed"
            for run in students
            if places[str(run.teacher)] in failed
        }
        return [held[run.key] for run in plan if run.key in held], reasons


def _note_unfinished(out: Path) -> None:
    """Writes which runs have begun and not ended, and how far their run directories have come."""
    lines = []
    for file in sorted(out.glob(f"{RUNS}/*/{CODE}")):
        folder = file.parent
        # Leave out what somebody has damaged: the next call plans it again.
        with contextlib.suppress(OSError, ValueError, TypeError):
            if not (folder / RECORD).is_file():
                run = PlannedRun(**json.loads((folder / PLANNED).read_text()))
                line = {key: vars(run)[key] for key in ("dataset", "budget", "row", "seed")}
                # Of epochs after the last checkpoint nothing is left.
                epochs = [c.epoch + (c.step is None) for c in checkpoints(folder)[-1:]] or [0]
                lines.append({**line, "epochs": epochs[0], "of": run.config["max_epochs"]})
    (out / UNFINISHED).unlink(missing_ok=True)
    if lines:
        append_lines(out / UNFINISHED, lines)


def _with_earlier_seeds(settings: BenchmarkSettings, out: Path) -> BenchmarkSettings:
    """Adds the seeds that the folder already has; refuses a folder of another benchmark."""
    if not (out / SETTINGS).is_file():
        return settings
    before = settings_in(out)
    if before.title != settings.title:
        raise UserError(
            f"--out {str(out)!r} holds the benchmark {before.title!r}, not "
            f"{settings.title!r}; name another folder"
        )
    return settings.model_copy(update={"seeds": sorted({*before.seeds, *settings.seeds})})


def _relabel(out: Path, plan: Sequence[PlannedRun], held: dict[str, Record]) -> None:
    """Adds records of runs whose row, budget or data set has another name now, under that name."""
    moved = []
    for run in plan:
        names = {"row": run.row, "budget": run.budget, "dataset": run.dataset, "kind": run.kind}
        record: Any = held.get(run.key)
        if record is not None and any(record[key] != name for key, name in names.items()):
            moved.append({**record, **names})
    if moved:
        append_lines(out / RECORDS, moved)
        held |= {record["key"]: record for record in moved}


def _collect(out: Path, plan: Sequence[PlannedRun], held: dict[str, Record]) -> list[Record]:
    """Adds new records of planned runs to ``records.jsonl`` and ``held``, and returns them."""
    fresh = []
    for run in plan:
        file = out / RUNS / run.folder / RECORD
        if run.key not in held and file.exists():
            fresh.append(read_json(file, Record))
    if fresh:
        append_lines(out / RECORDS, fresh)
        held |= {record["key"]: record for record in fresh}
    return fresh
