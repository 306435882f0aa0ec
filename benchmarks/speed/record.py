"""The record of a table, a line of JSON for each row, and the table as it is printed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.speed.effort import Effort
from benchmarks.speed.target import Finding, Measured
from solo_ext import host
from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, read_jsonl
from solo_ext.lab.training.run_dir import environment, package_version

HEADER = (
    "operation",
    "ours",
    "peer",
    "target",
    "measured",
    "A/A",
    "memory",
    "difference",
    "verdict",
    "note",
)
_STYLES = {"met": "green", "within the gate": "yellow", "missed": "bold red"}
NO_VERDICT = "none: quick"
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
        made_with, *lines = read_jsonl(self.file) or [{}]
        if made_with.keys() != self._made_with.keys():
            raise UserError(f"{self.file}: no record of a speed table; {remedy}")
        for key, value in self._made_with.items():
            # What was written has lists where there were tuples.
            if made_with[key] != json.loads(json.dumps(value)):
                raise UserError(f"{self.file}: measured with another {key}; {remedy}")
        return {line["row"]: line for line in lines}

    def __contains__(self, row: str) -> bool:
        return row in self._rows

    def add(self, row: str, measured: Measured, seconds: float) -> None:
        """Appends a row to the file."""
        if not self._rows:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.unlink(missing_ok=True)
            append_lines(self.file, [self._made_with])
        self._rows[row] = {
            "row": row,
            "seconds": round(seconds, 1),
            "findings": [f.as_json() for f in measured.findings],
            "details": measured.details,
        }
        append_lines(self.file, [self._rows[row]])

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


def cells(finding: Finding, verdicts: bool = True) -> tuple[str, ...]:
    """A line of the table; ``verdicts``: the sizes were those of the targets."""
    unit = "x" if finding.target is None else finding.target.unit
    measured = "" if finding.measured is None else f"{_short(finding.measured)} {unit}".strip()
    verdict: str = finding.verdict
    if not verdicts and finding.measured is not None:
        verdict = NO_VERDICT
    return (
        finding.label,
        finding.ours,
        finding.peer,
        "" if finding.target is None else str(finding.target),
        measured,
        "" if finding.again is None else f"{finding.again:.2f}",
        "" if finding.memory is None else f"{_short(finding.memory)} x",
        _difference(finding),
        verdict,
        finding.note,
    )


def table(findings: Iterable[Finding], verdicts: bool = True) -> Table:
    """The table for a terminal."""
    made = Table(*HEADER, box=box.SIMPLE)
    for finding in findings:
        row = cells(finding, verdicts)
        made.add_row(
            *row, style=None if not verdicts else _STYLES.get(row[HEADER.index("verdict")])
        )
    return made


def markdown(findings: Iterable[Finding], verdicts: bool = True) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    lines += ["| " + " | ".join(cells(f, verdicts)) + " |" for f in findings]
    return "\n".join(lines) + "\n"


def _difference(finding: Finding) -> str:
    if finding.difference is None:
        return ""
    most = finding.most_difference
    return f"{finding.difference:.1e}" + ("" if most is None else f" (<= {most:g})")


def _short(number: float) -> str:
    """Three digits that count."""
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"
