"""What a command shows on the terminal: lines, tables, and progress bars."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text


def say(args: argparse.Namespace, line: str) -> None:
    """Prints a line, unless ``--json`` asks for a document.

    >>> say(argparse.Namespace(json=False), "3 of 4 runs are done")
    3 of 4 runs are done
    >>> say(argparse.Namespace(json=True), "3 of 4 runs are done")
    """
    if not args.json:
        Console(highlight=False, soft_wrap=True, markup=False).print(line)


def show(args: argparse.Namespace, title: str, rows: list[dict[str, Any]]) -> None:
    """Prints a table (a single row as a column), unless ``--json`` asks for a document.

    >>> show(argparse.Namespace(json=True), "methods", [{"name": "pcl"}])
    """
    if args.json:
        return
    # Use Text, because brackets in a path or an error must not be read as markup.
    table = Table(title=Text(title), title_justify="left", show_header=len(rows) > 1)
    if len(rows) == 1:
        # One row of many numbers is wider than a terminal, so show it as a column.
        for key, value in rows[0].items():
            table.add_row(Text(key.replace("_", " ")), Text(_cell(value)))
    else:
        for key in rows[0]:
            # Never break a name into lines: configs have to spell it exactly.
            table.add_column(Text(key.replace("_", " ")), no_wrap=key == "name")
        for row in rows:
            table.add_row(*(Text(_cell(v)) for v in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 1 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "-" if value is None else str(value)


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Shows progress bars; yields a function of the task's name, batches done and total.

    >>> with progress_bars() as progress:
    ...     progress("train", 3, 10)
    """
    console = Console(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(console=console, transient=True, disable=not console.is_interactive) as bars:

        def progress(part: str, done: int, total: int) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total)
            bars.update(tasks[part], completed=done)

        yield progress
