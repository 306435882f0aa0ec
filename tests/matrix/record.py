"""What every cell of the matrix came to: a line each, of which the last one counts."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from solo_ext import host
from solo_ext.core.files import append_lines, locked, read_jsonl
from solo_ext.lab.experiments.records import code_version
from tests.matrix.rows import methods

FILE = Path(__file__).resolve().parents[2] / "results" / "matrix" / "records.jsonl"


class Outcome(NamedTuple):
    """A word for a check, and what it leaves open.

    ``equal`` to the last bit, ``close`` to floating-point precision, ``agree`` among the processes,
    ``refused``, ``not run`` or ``failed``.
    """

    word: str
    why: str = ""


def note(method: str, check: str, outcome: Outcome, seconds: float) -> None:
    """Writes a cell of the installed host."""
    _append(method=method, check=check, seconds=round(seconds, 1), **outcome._asdict())


def note_kills(kills: int, how: str) -> None:
    """Writes how many kills a run of PCL survived."""
    _append(method="pcl", check="kills", number=kills, how=how)


def note_workers(method: str, start_method: str, num_workers: int) -> None:
    """Writes that workers changed no number of a run."""
    _append(method=method, check="workers", start_method=start_method, num_workers=num_workers)


def _append(**line: Any) -> None:
    info = host.load().info
    made_with = {
        "host": info.generation,
        "fingerprint": info.fingerprint,
        "code": code_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "python": platform.python_version(),
    }
    listed = {"host": info.generation, "check": "methods", "methods": methods()}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with locked(FILE.with_name(f".{FILE.name}.lock")):
        known = listed in read_jsonl(FILE)
        append_lines(FILE, [line | made_with] if known else [listed, line | made_with])
