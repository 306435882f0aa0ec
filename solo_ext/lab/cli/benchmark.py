"""Implements `solo-ext benchmark` and `solo-ext demo`."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from solo_ext.config.compose import apply_overrides, parse
from solo_ext.core.errors import ConfigError
from solo_ext.lab.cli.output import say, show
from solo_ext.lab.experiments.launchers import Launcher, LocalLauncher, RayLauncher, SlurmLauncher
from solo_ext.lab.experiments.plan import PlannedRun, make_plan
from solo_ext.lab.experiments.records import (
    RECORDS,
    SETTINGS,
    Record,
    read_records,
    settings_in,
)
from solo_ext.lab.experiments.report import differences_table, scores_table, write_report
from solo_ext.lab.experiments.results import Results
from solo_ext.lab.experiments.run import run_benchmark
from solo_ext.lab.experiments.settings import BenchmarkSettings, read_benchmark
from solo_ext.lab.experiments.tuning import search, trial_settings, write_tuned


def _run(args: argparse.Namespace) -> dict[str, Any]:
    # Reading and checking the settings counts towards the limit.
    until = math.inf if args.within is None else time.monotonic() + 60 * args.within
    settings = read_benchmark(args.config, args.overrides)
    out = Path(args.out or Path("benchmark_runs") / Path(args.config).stem)
    known = read_records(out) if (out / RECORDS).is_file() else []
    plan = make_plan(settings, args.rows, args.devices, args.nodes, args.stages, known)
    if args.dry_run:
        held = {record["key"] for record in known}
        missing = [run for run in plan if run.key not in held]
        if args.within is None:
            return _dry_run(settings, missing, [], out)
        launcher = _launcher(args, settings.threads, out, until)
        assert isinstance(launcher, LocalLauncher)
        return _dry_slot(missing, launcher.places, args.within, out)
    if not plan:
        _progress("no run: no stage has these rows and seeds, or none is near its base yet")
    done, records = _run_plan(args, settings, plan, out, until)
    return {**done, **_written(args, out, None)} if records else done


def _tune(args: argparse.Namespace) -> dict[str, Any]:
    settings = read_benchmark(args.config, args.overrides)
    trials = trial_settings(settings, args.rows)
    out = Path(args.out or Path("benchmark_runs") / f"{Path(args.config).stem}-tuning")
    plan = make_plan(trials, None, args.devices, args.nodes)
    if (out / SETTINGS).is_file() and (others := settings_in(out).rows.keys() - trials.rows.keys()):
        problem = f"{str(out)!r} holds trials of other rows, such as {min(others)}"
        remedy = "name these rows too, whose trials are kept, or another folder by --out"
        raise ConfigError("--rows", args.rows or [*settings.rows], problem, remedy)
    if args.dry_run:
        return _dry_tune(trials, plan, out)
    every: dict[str, Any] = {}

    def run_all(so_far: BenchmarkSettings, rung: list[PlannedRun]) -> list[Record]:
        done, records = _run_plan(args, so_far, rung, out)
        failed = [*every.get("failed", []), *done["failed"]]
        every.update(done, failed=failed)
        return records

    scores = search(trials, plan, run_all)
    if not scores:
        return every
    file = write_tuned(settings, trials, scores, out)
    # By default runs of every tuned.yaml would have one folder in common.
    of_tuned = out.with_name(f"{Path(args.config).stem}-tuned")
    say(args, f"next  solo-ext benchmark run {file} --out {of_tuned}")
    return {**every, "tuned": str(file)}


def _dry_tune(trials: BenchmarkSettings, plan: list[PlannedRun], out: Path) -> dict[str, Any]:
    """Lists the first rung: which trials go on is not known yet, but how many at most."""
    rungs: list[list[PlannedRun]] = []
    assert trials.tuning is not None
    measure = trials.tuning.measure

    def pretend(_: BenchmarkSettings, rung: list[PlannedRun]) -> list[Any]:
        rungs.append(rung)
        # Equal trials go on in their order, the unchanged row first; most go on besides it if
        # it is the worst.
        return [
            {"row": run.row, "scores": {measure: float(not run.row.endswith(".0"))}} for run in rung
        ]

    search(trials, plan, pretend)
    first = rungs[0]
    later = {run.key: run for rung in rungs for run in rung if run not in first}
    return _dry_run(trials, first, list(later.values()), out)


def _run_plan(
    args: argparse.Namespace,
    settings: BenchmarkSettings,
    plan: list[PlannedRun],
    out: Path,
    until: float = math.inf,
) -> tuple[dict[str, Any], list[Record]]:
    launcher = _launcher(args, settings.threads, out, until)
    records, failed = run_benchmark(settings, plan, out, launcher, _progress)
    say(args, f"{len(records)} of {len(plan)} runs have records in {out}")
    counts = {"out": str(out), "records": len(records), "runs": len(plan)}
    return {**counts, "failed": _failures(failed)}, records


def _dry_slot(missing: Sequence[PlannedRun], places: int, within: int, out: Path) -> dict[str, Any]:
    """Lists which runs would start within a limit and when, by their declared minutes."""
    free, chosen = [0.0] * places, []
    for run in missing:
        begin = min(free)
        minutes = run.minutes or 0
        if begin + minutes <= within:
            free[free.index(begin)] += minutes
            chosen.append(run)
            _progress(f"{run.folder}  minute {begin:g} to {begin + minutes:g}")
    left = len(missing) - len(chosen)
    _progress(f"{len(chosen)} runs in {within} minutes, {places} at once; {left} after these")
    return {"out": str(out), "runs": [run.folder for run in chosen]}


def _dry_run(
    settings: BenchmarkSettings, runs: list[PlannedRun], later: list[PlannedRun], out: Path
) -> dict[str, Any]:
    """Lists runs, and says how many there are with the later ones, and how long they take."""
    for planned in runs:
        _progress(planned.folder)
    if later:
        _progress(f"then up to {len(later)} of these with more epochs")
    every = [*runs, *later]
    declared = [run.minutes for run in every if run.minutes is not None]
    duration = ""
    if every and len(declared) == len(every):
        cores = "a core" if settings.threads == 1 else f"{settings.threads} cores"
        duration = f": about {sum(declared):.0f} minutes of {cores}"
    _progress(f"{len(every)} runs{duration}")
    return {"out": str(out), "runs": [planned.folder for planned in runs]}


def _launcher(args: argparse.Namespace, threads: int, out: Path, until: float) -> Launcher:
    given = {"slurm": args.slurm, "ray": args.ray}
    for name, words in given.items():
        if words and args.launcher != name:
            why = f"the launcher is {args.launcher}"
            raise ConfigError(f"--{name}", words, why, f"leave it out, or add --launcher {name}")
    if args.nodes > 1 and args.launcher != "ray":
        why = f"a run of the launcher {args.launcher} has one node"
        raise ConfigError("--nodes", args.nodes, why, "leave it out, or add --launcher ray")
    if args.launcher == "local":
        return LocalLauncher(args.parallel, threads, args.devices, until)
    if until < math.inf:
        why = f"the launcher {args.launcher} has limits of its own"
        raise ConfigError("--within", args.within, why, "leave it out, or take --launcher local")
    options = OmegaConf.create({})
    apply_overrides(options, parse(given[args.launcher]))
    plain: Any = OmegaConf.to_container(options)
    if args.launcher == "ray":
        if args.parallel is not None:
            why = "Ray runs as many at once as its cluster has room for"
            remedy = "leave it out, or give --ray memory"
            raise ConfigError("--parallel", args.parallel, why, remedy)
        return RayLauncher(threads, args.devices, plain, args.nodes)
    if args.devices > 1:
        why = "a run in SLURM has one device"
        raise ConfigError("--devices", args.devices, why, "take --launcher local")
    return SlurmLauncher(args.parallel, threads, out / "slurm", plain)


def _report(args: argparse.Namespace) -> dict[str, Any]:
    return _written(args, Path(args.records), Path(args.out) if args.out else None)


def _written(args: argparse.Namespace, folder: Path, out: Path | None) -> dict[str, Any]:
    files = [str(file) for file in write_report(folder, out)]
    for file in files:
        say(args, file)
    return {"written": files}


def _demo(args: argparse.Namespace) -> dict[str, Any]:
    begin, out = time.monotonic(), Path(args.out)
    settings = read_benchmark("demo")
    if args.epochs is not None:
        budget = {f"{args.epochs}-epochs": [f"max_epochs={args.epochs}"]}
        settings = settings.model_copy(update={"budgets": budget})
    _progress(settings.about)
    launcher = LocalLauncher(None, settings.threads)
    records, failed = run_benchmark(settings, make_plan(settings), out, launcher, _progress)
    failures = _failures(failed)
    results = Results(settings, records)
    tables: dict[str, list[dict[str, str]]] = {"scores": [], "differences": []}
    # Show the costs in the report only: a terminal is too narrow for all columns.
    kept = {"Row", "Seeds", "Difference", "Pairs", *results.measures}
    for place in results.places():
        for name, of in (("scores", scores_table), ("differences", differences_table)):
            table = of(results, place)
            named = [zip(table.head, row, strict=True) for row in table.rows]
            tables[name] += [{k: v for k, v in row if k in kept} for row in named]
    for name, rows in tables.items():
        if rows:
            show(args, name, rows)
    say(args, "Percent: mean ± deviation over seeds; differences paired by seed, 95 % interval.")
    written = _written(args, out, None) if records else {}
    seconds = round(time.monotonic() - begin, 1)
    say(args, f"{seconds:.0f} s")
    return {"about": settings.about, "seconds": seconds, "failed": failures, **written, **tables}


def _failures(failed: dict[str, str]) -> list[dict[str, str]]:
    for run, reason in failed.items():
        _progress(f"failed  {run}: {reason}")
    return [{"run": run, "reason": reason} for run, reason in failed.items()]


def _progress(text: str) -> None:
    # Do not end the runs because the terminal is closed.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


ACTIONS = {"run": _run, "tune": _tune, "report": _report, "demo": _demo}
