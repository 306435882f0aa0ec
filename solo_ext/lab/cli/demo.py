"""The `solo-ext demo` command: a benchmark of a few minutes that shows what the plugin adds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from solo_ext.lab.experiments.launchers import GIGABYTE, LocalLauncher
from solo_ext.lab.experiments.plan import make_plan
from solo_ext.lab.experiments.report import write_report
from solo_ext.lab.experiments.results import Results
from solo_ext.lab.experiments.run import Progress, run_benchmark
from solo_ext.lab.experiments.settings import read_benchmark
from solo_ext.lab.experiments.statistics import Estimate, estimate
from solo_ext.lab.experiments.tables import difference, mean_and_deviation, mean_and_interval


def run_demo(out: Path, *, epochs: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Runs the benchmark ``demo``, in single-threaded processes side by side.

    Runs that an earlier call finished in ``out`` are reused, and unfinished ones continue.

    Args:
        out: folder of records, runs and ``report.html``.
        epochs: of every run; those of the benchmark by default.
        quiet: prints nothing on standard output.

    Returns:
        Scores by row and differences between rows, the path of the report, and what failed.

    Raises:
        UserError: solo-learn is missing, or ``out`` cannot be used.
    """
    begin = time.monotonic()
    settings = read_benchmark("demo")
    if epochs is not None:
        budget = {f"{epochs}-epochs": [f"max_epochs={epochs}"]}
        settings = settings.model_copy(update={"budgets": budget})
    progress = Console(stderr=True, highlight=False)
    progress.print(Text(settings.about))
    plan = make_plan(settings)
    launcher = LocalLauncher(None, settings.threads, settings.memory * GIGABYTE, reuse=True)
    with Progress(plan, progress) as watch:
        done = run_benchmark(settings, plan, out, launcher, watch)
    for outcome in done.failed:
        progress.print(Text(f"failed  {outcome.folder.name}: {outcome.reason}"), soft_wrap=True)
    results = Results(settings, done.records)
    scores: _Lines = {}
    differences: _Lines = {}
    for place in results.places():
        for row in results.rows(place):
            label = results.label(row)
            scores[label] = _known(
                {
                    m: estimate(list(results.scores(place, row, m).values()))
                    for m in results.measures
                }
            )
            for base in results.settings.rows[row].bases:
                differences[f"{label} minus {results.label(base)}"] = _known(
                    {m: difference(results, place, row, base, m) for m in results.measures}
                )
    page = str(write_report([out])[-1]) if done.records else None
    seconds = time.monotonic() - begin
    if not quiet:
        console = Console(highlight=False)
        console.print(_table(results.measures, scores, differences))
        console.print(
            "Percent: mean ± deviation over seeds; differences are paired by seed, with their "
            "95 % interval.",
        )
        console.print(Text(f"{seconds:.0f} s; report: {page}"), soft_wrap=True)
    return {
        "about": settings.about,
        "scores": _plain(scores),
        "differences": _plain(differences),
        "report": page,
        "seconds": round(seconds, 1),
        "failed": [{"run": o.folder.name, "reason": o.reason} for o in done.failed],
    }


_Lines = dict[str, dict[str, Estimate]]
"""Maps the name of a row or a difference to its estimates by measure."""


def _known(estimates: Mapping[str, Estimate | None]) -> dict[str, Estimate]:
    return {measure: found for measure, found in estimates.items() if found is not None}


def _plain(lines: _Lines) -> dict[str, dict[str, dict[str, Any]]]:
    return {name: {m: asdict(one) for m, one in held.items()} for name, held in lines.items()}


def _table(measures: Sequence[str], scores: _Lines, differences: _Lines) -> Table:
    table = Table("", "n")
    for measure in measures:
        table.add_column(measure.replace("_", " "), justify="right")
    for lines, write in ((scores, mean_and_deviation), (differences, mean_and_interval)):
        for name, held in lines.items():
            count = max((one.count for one in held.values()), default=0)
            cells = [write(held.get(m)).replace(" (", "\n(") for m in measures]
            table.add_row(Text(name), str(count), *cells)
        table.add_section()
    return table
