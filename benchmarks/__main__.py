"""``python -m benchmarks``: measures all rows or some, and prints the table."""

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

import benchmarks
from benchmarks.page import RESULTS, files
from benchmarks.record import QUICK, Effort, Record, table
from benchmarks.rows import ROWS
from solo_ext.core.errors import UserError, suggest_name
from solo_ext.core.files import write_text

USER_MISTAKE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=benchmarks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"all, or of: {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, no verdicts")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    parser.add_argument("--data", type=Path, help="class folders of JPEG files, else made ones")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--json", type=Path, metavar="OUT", help="the record, and beside it OUT.md")
    where.add_argument("--write", action="store_true", help="record in results/speed, and the page")
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
    if args.quick and args.write:
        raise UserError("--quick measures nothing that --write should keep; use one of them")
    if args.data is not None and not args.data.is_dir():
        raise UserError(f"--data {args.data}: no folder; name class folders of JPEG files")
    effort = replace(QUICK if args.quick else Effort(), device=device, data=args.data)
    out = RESULTS / f"{device}.jsonl" if args.write else args.json
    record = Record(out or Path("runs") / f"speed-{'quick' if args.quick else device}.jsonl")
    torch.set_num_threads(1)
    for name in names:
        torch.manual_seed(0)
        begin = time.perf_counter()
        measured = ROWS[name](effort)
        record.add(name, measured, effort, time.perf_counter() - begin)
        print(f"## {name}\n\n{table(measured.findings, not args.quick)}", flush=True)
    made = {record.file.with_suffix(".md"): table(record.everything(), not args.quick)}
    for file, text in {**made, **(files() if args.write else {})}.items():
        write_text(file, text)
        print(f"{record.file} -> {file}")
    found = [f for name in names for f in record.findings(name)]
    return [] if args.quick else [f.label for f in found if f.verdict == "missed"]


if __name__ == "__main__":
    sys.exit(main())
