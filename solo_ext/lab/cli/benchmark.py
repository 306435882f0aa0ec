"""What the `solo-ext benchmark` commands do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from solo_ext.core.errors import ConfigError

if TYPE_CHECKING:
    from solo_ext.lab.experiments.settings import BenchmarkSettings


def run_command(args: argparse.Namespace) -> Any:
    """Dispatches ``solo-ext benchmark``."""
    return {"run": _run, "tune": _tune, "report": _report}[args.action](args)


def _run(args: argparse.Namespace) -> Any:
    from solo_ext.lab.experiments.settings import read_benchmark

    settings = read_benchmark(args.config, args.overrides)
    out = Path(args.out or Path("benchmark_runs") / Path(args.config).stem)
    done, records = _run_settings(args, settings, args.rows, out)
    if args.dry_run or not records:
        return done
    return {**done, **_write_report(args, [out], None)}


def _tune(args: argparse.Namespace) -> Any:
    from solo_ext.lab.experiments.settings import read_benchmark
    from solo_ext.lab.experiments.tuning import trial_settings, tunable, write_tuned

    settings = read_benchmark(args.config, args.overrides)
    rows = tunable(settings, args.rows)
    out = Path(args.out or Path("benchmark_runs") / f"{Path(args.config).stem}-tuning")
    done, records = _run_settings(args, trial_settings(settings, rows), None, out)
    if args.dry_run or done["failed"]:
        return done
    file = write_tuned(settings, rows, records, out)
    if not args.json:
        Console(highlight=False).print(Text(f"next  solo-ext benchmark run {file}"))
    return {**done, "tuned": str(file)}


def _run_settings(
    args: argparse.Namespace, settings: BenchmarkSettings, rows: list[str] | None, out: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the planned runs; returns what to print, and the last seed's record of each row."""
    from solo_ext.lab.experiments.plan import make_plan
    from solo_ext.lab.experiments.run import Progress, run_benchmark

    plan = make_plan(settings, rows, args.devices)
    console = Console(stderr=True, highlight=False)
    if args.dry_run:
        for planned in plan:
            console.print(Text(planned.folder), soft_wrap=True)
        return {"out": str(out), "runs": [planned.folder for planned in plan]}, {}
    launcher = _launcher(args, settings.threads, settings.memory, out)
    with Progress(plan, console) as watch:
        result = run_benchmark(settings, plan, out, launcher, watch)
    for outcome in result.failed:
        line = f"failed  {outcome.folder.name}: {outcome.reason}"
        console.print(Text(line), soft_wrap=True)
    if not args.json:
        count = f"{len(result.records)} of {len(plan)} runs have records in {out}"
        Console(highlight=False).print(Text(count), soft_wrap=True)
    failed = [{"run": o.folder.name, "reason": o.reason} for o in result.failed]
    counts = {"out": str(out), "records": len(result.records), "runs": len(plan)}
    return {**counts, "failed": failed}, {record["row"]: record for record in result.records}


def _launcher(args: argparse.Namespace, threads: int, memory: float, out: Path) -> Any:
    from solo_ext.lab.experiments.launchers import GIGABYTE, LocalLauncher, SlurmLauncher

    for name in ("parallel", "devices"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", value, "below 1", "give a number of at least 1")
    if args.launcher == "local":
        if args.slurm:
            raise ConfigError("--slurm", args.slurm, "the launcher is local", "leave it out")
        return LocalLauncher(args.parallel, threads, memory * GIGABYTE, args.devices)
    if args.devices > 1:
        raise ConfigError(
            "--devices", args.devices, "a run in SLURM has one device", "take --launcher local"
        )
    from omegaconf import OmegaConf

    from solo_ext.config.compose import apply_overrides, parse

    options = OmegaConf.create({})
    apply_overrides(options, parse(args.slurm))
    plain: Any = OmegaConf.to_container(options)
    return SlurmLauncher(args.parallel, threads, out / "slurm", plain)


def _report(args: argparse.Namespace) -> Any:
    return _write_report(
        args, [Path(r) for r in args.records], Path(args.out) if args.out else None
    )


def _write_report(args: argparse.Namespace, folders: list[Path], out: Path | None) -> Any:
    from solo_ext.lab.experiments.report import write_report

    files = write_report(folders, out)
    if not args.json:
        for file in files:
            Console(highlight=False).print(Text(str(file)), soft_wrap=True)
    return {"written": [str(file) for file in files]}
