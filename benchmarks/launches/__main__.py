"""``python -m benchmarks.launches``: traces all rows and prints the table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import benchmarks.launches
from benchmarks.launches.table import ROWS, Row
from benchmarks.launches.tracing import Cost
from benchmarks.steps import made_by
from solo_ext.core.files import write_text
from solo_ext.lab.pages import Table, markdown_table

RECORD = Path("results") / "speed" / "launches.json"
HEADER = ("row", "launches", "GB", "GFLOP", "copies", "waits")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches",
        description=benchmarks.launches.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help=f"write {RECORD} and the page beside")
    args = parser.parse_args(arguments)
    rows = [make() for make in ROWS.values()]
    made = markdown_table(table(rows))
    print(made)
    if args.write:
        write_text(RECORD, json.dumps(record(rows), indent=1) + "\n")
        head = "Counted without a GPU: ours, and after a stroke the plain form.\n\n"
        write_text(RECORD.with_suffix(".md"), f"{head}{made}\n")
    return 0


def record(rows: Iterable[Row]) -> dict[str, Any]:
    """Plain values of all rows, and what they depend on."""
    return {**made_by(), "rows": {row.label: row.as_json() for row in rows}}


def table(rows: Iterable[Row]) -> Table:
    """The rows as text."""
    return Table(list(HEADER), [cells(row) for row in rows], frozenset(range(1, len(HEADER))))


def cells(row: Row) -> list[str]:
    """A line of the table: ours, and after a stroke the plain form."""

    def both(of: Callable[[Cost], str]) -> str:
        return of(row.ours) if row.plain is None else f"{of(row.ours)} / {of(row.plain)}"

    flops = " + ".join(f"{n / 1e9:,.1f} {kind}" for kind, n in row.ours.flops.items())
    return [
        row.label,
        both(lambda cost: f"{len(cost):,}"),
        both(lambda cost: f"{cost.bytes / 1e9:,.2f}"),
        flops,
        str(row.ours.copies),
        str(len(row.ours.waits)),
    ]


if __name__ == "__main__":
    sys.exit(main())
