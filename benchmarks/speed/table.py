"""The table as it is printed, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich import box
from rich.table import Table

from benchmarks.speed.finding import Finding

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
