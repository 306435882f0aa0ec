"""``python -m benchmarks.speed``: measures all rows or some, and prints the table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Spinning OpenMP threads make busy cores ten times slower; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The profiler announces every start and end of itself.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch
from rich.console import Console

import benchmarks.speed
from benchmarks.speed.record import Record, markdown, table
from benchmarks.speed.rows import ROWS
from benchmarks.speed.target import QUICK, Effort
from solo_ext.core.errors import UserError, suggest_name
from solo_ext.core.files import write_text

USER_MISTAKE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=benchmarks.speed.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rows = f"these alone; the record keeps its others: {', '.join(ROWS)}"
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=rows)
    parser.add_argument("--quick", action="store_true", help="small sizes, no verdicts")
    parser.add_argument("--check", action="store_true", help="fail where one of the rows is missed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    parser.add_argument("--json", type=Path, metavar="OUT", help="the record; beside it OUT.md")
    args = parser.parse_args(arguments)
    try:
        missed = run(args)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return USER_MISTAKE
    if args.check and missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
    return int(args.check and bool(missed))


def run(args: argparse.Namespace) -> list[str]:
    """Measures and prints; returns the labels of what missed its target, with ``quick`` none.

    Raises:
        UserError: an unknown row, or no GPU.
    """
    names = args.rows or list(ROWS)
    for name in names:
        if name not in ROWS:
            raise UserError(f"no row {name!r}; {suggest_name(name, ROWS, show=len(ROWS))}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU; use --device cpu")
    effort = replace(QUICK if args.quick else Effort(), device=device)
    folder = Path("runs") if args.quick else Path("results") / "speed"
    out = args.json or folder / f"{'speed-quick' if args.quick else device}.jsonl"
    torch.set_num_threads(1)
    record = Record(out, effort, fresh=not args.rows)
    console = Console()
    # Tables are wider than what a file or pipe is taken to be.
    console = console if console.is_terminal else Console(width=200)
    for name in names:
        torch.manual_seed(0)
        begin = time.perf_counter()
        measured = ROWS[name](effort)
        record.add(name, measured, time.perf_counter() - begin)
        console.print(f"[bold]{name}[/bold]")
        console.print(table(record.findings(name), not args.quick))
    held = [f for name in ROWS for f in record.findings(name)]
    missed = [f.label for name in names for f in record.findings(name) if f.verdict == "missed"]
    write_text(out.with_suffix(".md"), markdown(held, not args.quick))
    console.print(f"record: {out}, {out.with_suffix('.md')}")
    return [] if args.quick else missed


if __name__ == "__main__":
    sys.exit(main())
