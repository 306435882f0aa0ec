"""The record of a table, a line of JSON for each row, and the table as it is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.speed.target import Effort, Finding, Measured
from solo_ext.core.files import read_jsonl, write_text
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
_PEERS = ("solo-learn", "lightly", "kornia", "faiss-cpu", "faiss-gpu-cu12", "flash-kmeans", "timm")


class Record:
    """What was measured, in a file: how and where, then a line for each row.

    Rows that the file holds are taken over, unless it is to be ``fresh``.
    """

    def __init__(self, file: Path, effort: Effort, fresh: bool = False) -> None:
        self.file = file
        found = environment()
        peers = {name: package_version(name) for name in _PEERS}
        self._about = {
            "effort": asdict(effort),
            "environment": {**found, "peers": peers, "device": effort.device},
        }
        held = [] if fresh or not file.is_file() else read_jsonl(file)[1:]
        self._rows: dict[str, Any] = {line["row"]: line for line in held}

    def add(self, row: str, measured: Measured, seconds: float) -> None:
        """Writes a row to the file, in place of what was measured of it before."""
        self._rows[row] = {
            "row": row,
            "seconds": round(seconds, 1),
            "findings": [f.as_json() for f in measured.findings],
            "details": measured.details,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = [self._about, *self._rows.values()]
        write_text(self.file, "".join(f"{json.dumps(line)}\n" for line in lines))

    def findings(self, row: str) -> list[Finding]:
        """Lines of a row; none of one that was not measured."""
        return [Finding.from_json(f) for f in self._rows.get(row, {"findings": []})["findings"]]


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
