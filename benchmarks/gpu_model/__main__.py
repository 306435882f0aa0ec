"""``python -m benchmarks.gpu_model``: traces all rows and prints the table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import benchmarks.gpu_model
from benchmarks.gpu_model.gpus import ATTAINED_BANDWIDTH, ATTAINED_FLOPS, GPUS, LAUNCH
from benchmarks.gpu_model.table import ROWS, Row
from benchmarks.gpu_model.tracing import Cost
from solo_ext.core.files import write_text

RECORD = Path("results") / "speed" / "gpu_model.jsonl"
HEADER = ("row", "launches", "GB", "GFLOP", "waits", *(f"{name} ms (est.)" for name in GPUS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_model",
        description=benchmarks.gpu_model.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h200", help="judged by it")
    parser.add_argument("--check", action="store_true", help="fail where a bound is missed")
    parser.add_argument("--json", action="store_true", help="print the rows as lines of JSON")
    args = parser.parse_args(arguments)
    rows = [make() for make in ROWS.values()]
    lines = [json.dumps(line) for line in (about(), *(row.as_json() for row in rows))]
    if args.json:
        print("\n".join(lines))
    elif not args.check:
        write_text(RECORD, "".join(f"{line}\n" for line in lines))
        write_text(RECORD.with_suffix(".md"), page(rows, args.gpu))
    if not args.json:
        console = Console()
        (console if console.is_terminal else Console(width=200)).print(table(rows, args.gpu))
    missed = [f"{row.label} is missed" for row in rows if not row.met(GPUS[args.gpu])]
    if args.check and missed:
        print("\n".join(missed), file=sys.stderr)
    return int(args.check and bool(missed))


def about() -> dict[str, Any]:
    """What the estimates rest on."""
    assumed = {
        "bandwidth attained": ATTAINED_BANDWIDTH,
        "FLOPs attained": ATTAINED_FLOPS,
        "seconds per launch": LAUNCH,
    }
    gpus = {name: gpu._asdict() for name, gpu in GPUS.items()}
    torch_version = torch.__version__.partition("+")[0]
    return {"estimates, nothing is measured": assumed, "gpus": gpus, "torch": torch_version}


def cells(row: Row, gpu: str) -> list[str]:
    """A line of the table: ours, and after a stroke the plain form."""

    def both(of: Callable[[Cost], str]) -> str:
        return of(row.ours) if row.plain is None else f"{of(row.ours)} / {of(row.plain)}"

    flops = " + ".join(f"{n / 1e9:,.1f} {kind}" for kind, n in row.ours.flops.items())
    return [
        row.label,
        both(lambda cost: f"{len(cost):,}"),
        both(lambda cost: f"{cost.bytes / 1e9:,.2f}"),
        flops,
        str(len(row.ours.waits)),
        *(both(lambda cost, g=g: f"{cost.milliseconds(g):,.3g}") for g in GPUS.values()),
        "met" if row.met(GPUS[gpu]) else "missed",
    ]


def table(rows: Iterable[Row], gpu: str) -> Table:
    """The table for a terminal."""
    made = Table(*HEADER, f"on {gpu}", box=box.SIMPLE)
    for row in rows:
        made.add_row(*cells(row, gpu), style=None if row.met(GPUS[gpu]) else "yellow")
    return made


def page(rows: Iterable[Row], gpu: str) -> str:
    """The table as Markdown."""
    lines = [
        "Estimates of a model, not measurements: no GPU was there. Ours / plain form;",
        "[The page on speed](../../docs/benchmarks/speed.md#on-a-gpu-that-is-not-there) has what "
        "they rest on.",
        "",
        "| " + " | ".join((*HEADER, f"on {gpu}")) + " |",
        "|---" * (len(HEADER) + 1) + "|",
        *("| " + " | ".join(cells(row, gpu)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
