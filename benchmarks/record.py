"""What a row found, with its verdict; the record, a line of JSON for each row; and the table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from solo_ext.core.files import read_jsonl, write_text
from solo_ext.lab.training.run_dir import environment, package_version


@dataclass(frozen=True)
class Effort:
    """How much is measured, and where.

    Attributes:
        shrink: sizes are divided by it; verdicts are given at 1 alone.
        compiled: whether peers are compiled, which takes seconds for each.
        device: "cpu" or "cuda"; launches are counted on "meta".
        data: class folders of JPEG files, for rows that read files.
    """

    rounds: int = 9
    warm: int = 3
    shrink: int = 1
    compiled: bool = True
    device: str = "cpu"
    data: Path | None = None

    def size(self, full: int, least: int = 16) -> int:
        """The size in place of ``full``."""
        return max(full // self.shrink, min(full, least))


QUICK = Effort(rounds=3, warm=1, shrink=16, compiled=False)

Verdict = Literal["met", "within the gate", "missed", "no target", "not measured"]

GATE = 0.85
"""Share of a ratio that a change must not fall below."""


@dataclass(frozen=True)
class Target:
    """What a number is to be: at least a ratio, with a gate, or at most some number."""

    value: float
    sense: Literal["at_least", "at_most"] = "at_least"
    unit: str = "x"

    def verdict(self, measured: float | None) -> Verdict:
        """Whether ``measured`` is as it should be; ``None`` is a number that there is not."""
        if measured is None:
            return "not measured"
        if self.sense == "at_most":
            return "met" if measured <= self.value else "missed"
        if measured >= self.value:
            return "met"
        return "within the gate" if measured >= GATE * self.value else "missed"

    def __str__(self) -> str:
        sign = ">=" if self.sense == "at_least" else "<="
        return f"{sign} {self.value:g} {self.unit}".strip()


def at_most(value: float, unit: str = "x") -> Target:
    """A number that is not to be exceeded."""
    return Target(value, "at_most", unit)


@dataclass(frozen=True)
class Finding:
    """One number, its target and what was measured.

    Attributes:
        ours: which of our variants.
        peer: what it is compared with.
        again: the same of ours a second time over ours.
        memory: the peer's memory over ours.
        difference: of what both return; beyond ``most_difference`` the number is missed.
        note: why there is no number, or what else there is to say.
        unit: where there is no target.
    """

    label: str
    target: Target | None
    measured: float | None = None
    ours: str = ""
    peer: str = ""
    again: float | None = None
    memory: float | None = None
    difference: float | None = None
    most_difference: float | None = None
    note: str = ""
    unit: str = "x"

    @property
    def verdict(self) -> Verdict:
        """What the table says; other results than the peer's are missed, nan included."""
        most = self.most_difference
        if self.difference is not None and most is not None and not self.difference <= most:
            return "missed"
        if self.target is None:
            return "no target" if self.measured is not None else "not measured"
        return self.target.verdict(self.measured)

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> Finding:
        """What the record holds."""
        target = held["target"] and Target(**held["target"])
        values = {k: v for k, v in held.items() if k not in ("verdict", "target")}
        return cls(target=target, **values)


class Measured(NamedTuple):
    """Lines of the table, and everything behind them, for the record."""

    findings: list[Finding]
    details: dict[str, Any]


Row = Callable[[Effort], Measured]
"""Measures an operation with its peers and targets."""

_PEERS = ("solo-learn", "lightly", "kornia", "faiss-cpu", "faiss-gpu-cu12", "flash-kmeans", "timm")


@dataclass
class Record:
    """A file with a line for each row: where, how and when it was measured, and what was found."""

    file: Path
    rows: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = {line["row"]: line for line in read_jsonl(self.file)}

    def add(self, row: str, measured: Measured, effort: Effort, seconds: float) -> None:
        """Writes a row to the file, in place of what was measured of it before."""
        peers = {name: package_version(name) for name in _PEERS}
        self.rows[row] = {
            "row": row,
            "seconds": round(seconds, 1),
            "effort": {k: v for k, v in asdict(effort).items() if k != "data"},
            "environment": {**environment(), "peers": peers},
            "findings": [{**asdict(f), "verdict": f.verdict} for f in measured.findings],
            "details": measured.details,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, "".join(f"{json.dumps(line)}\n" for line in self.rows.values()))

    def findings(self, row: str) -> list[Finding]:
        """Lines of a row; none of one that was not measured."""
        return [Finding.from_json(f) for f in self.rows.get(row, {"findings": []})["findings"]]

    def everything(self) -> list[Finding]:
        """Lines of all rows."""
        return [finding for row in self.rows for finding in self.findings(row)]


HEADER = (
    *("what", "ours", "peer", "target", "measured"),
    *("A/A", "memory", "difference", "verdict", "note"),
)


def table(findings: Iterable[Finding], verdicts: bool = True) -> str:
    """The table as Markdown; ``verdicts``: the sizes were those of the targets."""
    lines = [HEADER, ("---",) * len(HEADER), *(_cells(f, verdicts) for f in findings)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(finding: Finding, verdicts: bool) -> tuple[str, ...]:
    unit = finding.unit if finding.target is None else finding.target.unit
    difference = ""
    if finding.difference is not None:
        most = finding.most_difference
        difference = f"{finding.difference:.1e}" + ("" if most is None else f" (<= {most:g})")
    return (
        finding.label,
        finding.ours,
        finding.peer,
        "" if finding.target is None else str(finding.target),
        "" if finding.measured is None else f"{_short(finding.measured)} {unit}".strip(),
        "" if finding.again is None else f"{finding.again:.2f}",
        "" if finding.memory is None else f"{_short(finding.memory)} x",
        difference,
        finding.verdict if verdicts or finding.measured is None else "none: quick",
        finding.note,
    )


def _short(number: float) -> str:
    """Three digits that count."""
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"
