"""The table that a benchmark shows while it runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from solo_ext.lab.experiments.epoch_times import EPOCHS, read_epochs
from solo_ext.lab.experiments.plan import PlannedRun
from solo_ext.lab.experiments.records import Record


class LiveTable:
    """A line for each row of the grid; where nobody looks, a line for each finished run.

    Args:
        plan: all runs.
        console: where to.
    """

    def __init__(self, plan: Sequence[PlannedRun], console: Console) -> None:
        self.plan, self.console = plan, console
        self._live = Live(console=console) if console.is_terminal else None
        self._known: set[str] = set()
        self._first = True

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, runs: Path, records: Mapping[str, Record]) -> None:
        """Looks at the run directories again."""
        if self._live is not None:
            self._live.update(self._table(runs, records))
            return
        fresh = [run for run in self.plan if run.key in records and run.key not in self._known]
        self._known |= {run.key for run in fresh}
        if self._first:
            self._first = False
            if fresh:
                self._print(f"{len(fresh)} of {len(self.plan)} runs were finished before")
            return
        for run in fresh:
            numbers = "  ".join(f"{k} {v:.2f}" for k, v in records[run.key]["scores"].items())
            count = f"{len(self._known)}/{len(self.plan)}"
            where = f"{run.dataset} {run.budget} {run.row} seed {run.seed}"
            self._print(f"{count}  {where}  {numbers}")

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _table(self, runs: Path, records: Mapping[str, Record]) -> Table:
        done = sum(run.key in records for run in self.plan)
        table = Table(title=f"{done} of {len(self.plan)} runs", title_justify="left")
        for name in ("", "runs", "now", "scores"):
            table.add_column(name)
        groups: dict[tuple[str, str, str], list[PlannedRun]] = {}
        for run in self.plan:
            groups.setdefault((run.dataset, run.budget, run.row), []).append(run)
        for place, held in groups.items():
            finished = [records[r.key] for r in held if r.key in records]
            table.add_row(
                Text(" ".join(p for p in place if p != "default")),
                f"{len(finished)}/{len(held)}",
                _now([r for r in held if r.key not in records], runs),
                _scores(finished),
            )
        return table


def _now(unfinished: Sequence[PlannedRun], runs: Path) -> str:
    """Epochs of the runs that have begun."""
    found = []
    for run in unfinished:
        epochs = len(read_epochs(runs / run.folder / EPOCHS))
        if epochs:
            total = run.config.get("max_epochs")
            found.append(f"seed {run.seed}: {epochs}/{total}")
    return ", ".join(found)


def _scores(finished: Sequence[Record]) -> str:
    if not finished:
        return ""
    names = finished[0]["scores"]
    found = []
    for name in names:
        values = [r["scores"][name] for r in finished if name in r["scores"]]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        found.append(f"{name} {statistics.fmean(values):.2f}{spread}")
    return "  ".join(found)
