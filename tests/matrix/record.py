"""What every cell of the matrix came to, as a file that a part of the tests can renew."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from solo_ext import host
from solo_ext.core.files import locked, write_text
from solo_ext.lab.experiments.records import code_version
from tests.matrix.rows import methods

FOLDER = Path(__file__).resolve().parents[2] / "results" / "matrix"


class Outcome(NamedTuple):
    """Of a check.

    Attributes:
        word: ``equal`` to the last bit, ``close`` to floating-point precision, ``agree`` among the
            processes, ``refused``, ``not run`` or ``failed``.
        why: what the word leaves open.
    """

    word: str
    why: str = ""


def note(method: str, check: str, outcome: Outcome, seconds: float) -> None:
    """Writes a cell into the record of the installed host."""
    cell = {**outcome._asdict(), "seconds": round(seconds, 1)}
    with _held() as (held, made_with):
        held.setdefault("cells", {}).setdefault(method, {})[check] = cell | made_with


def note_kills(kills: int, how: str) -> None:
    """Writes how many kills a run of PCL survived into the record of the installed host."""
    with _held() as (held, made_with):
        held["kills"] = {"number": kills, "how": how} | made_with


def note_workers(method: str, start_method: str, num_workers: int) -> None:
    """Writes that workers changed no number of a run into the record of the installed host."""
    with _held() as (held, made_with):
        of_method = held.setdefault("workers", {}).setdefault(method, {})
        of_method.setdefault(start_method, {})[str(num_workers)] = made_with


@contextlib.contextmanager
def _held() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The record, to be changed, and what is run now."""
    info = host.load().info
    file = FOLDER / f"{info.generation.replace('.', '_')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f".{file.name}.lock")):
        held: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        held["host"], held["methods"] = {"version": info.version}, methods()
        yield held, {"host": info.fingerprint, **_made_with()}
        write_text(file, json.dumps(held, indent=1, sort_keys=True) + "\n")


def _made_with() -> dict[str, Any]:
    return {
        "code": code_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "python": platform.python_version(),
    }
