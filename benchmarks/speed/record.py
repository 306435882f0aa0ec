"""The record of a table: one JSON file, written after every row."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.speed.effort import Effort
from benchmarks.speed.finding import Finding
from benchmarks.speed.row import Measured
from solo_ext import host
from solo_ext.core.errors import UserError
from solo_ext.core.files import write_text
from solo_ext.lab.training.run_dir import environment, package_version

_ROOT = Path(__file__).resolve().parents[2]
_PEERS = ("solo-learn", "lightly", "kornia", "faiss-cpu", "faiss-gpu-cu12", "flash-kmeans", "timm")


class Record:
    """What was measured so far, in a file.

    Args:
        file: the file; what it holds of an interrupted table is taken over.
        effort: of the table.
        fresh: begin anew, whatever the file holds.

    Raises:
        UserError: the file is no such record, or of other settings, code or machine.
    """

    def __init__(self, file: Path, effort: Effort, fresh: bool = False) -> None:
        self.file = file
        self._made_with = {
            "effort": asdict(effort),
            "code": code_digest(),
            "environment": _environment(effort),
        }
        self._rows: dict[str, Any] = {}
        if file.is_file() and not fresh:
            self._rows = self._taken_over()

    def _taken_over(self) -> dict[str, Any]:
        remedy = "give another --json, or --fresh to begin anew"
        try:
            held = json.loads(self.file.read_text())
            rows: dict[str, Any] = held["rows"]
            made_with = {key: held[key] for key in self._made_with}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.file}: no record of a speed table; {remedy}") from None
        for key, value in self._made_with.items():
            # What was written has lists where there were tuples.
            if made_with[key] != json.loads(json.dumps(value)):
                raise UserError(f"{self.file}: measured with another {key}; {remedy}")
        return rows

    def __contains__(self, row: str) -> bool:
        return row in self._rows

    def add(self, row: str, measured: Measured, seconds: float) -> None:
        """Adds a row and writes the file."""
        self._rows[row] = {
            "seconds": round(seconds, 1),
            "findings": [f.as_json() for f in measured.findings],
            "details": measured.details,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self._made_with, "rows": self._rows}, indent=1)
        write_text(self.file, text + "\n")

    def findings(self, row: str) -> list[Finding]:
        """Lines of a row."""
        return [Finding.from_json(f) for f in self._rows[row]["findings"]]


def code_digest() -> str:
    """Changes with every file of the package and of this benchmark, and with every config."""
    digest = hashlib.sha256()
    for folder, kind in (("solo_ext", "*.py"), ("benchmarks", "*.py"), ("configs", "*.yaml")):
        for file in sorted((_ROOT / folder).rglob(kind)):
            digest.update(file.relative_to(_ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _environment(effort: Effort) -> dict[str, Any]:
    found = environment(host.load().info)
    peers = {name: package_version(name) for name in _PEERS}
    return {**found, "peers": peers, "device": effort.device}
