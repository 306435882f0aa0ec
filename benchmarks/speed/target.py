"""How much is measured, and a line of the table: what was measured, its target and verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Effort:
    """How much is measured, and where.

    Attributes:
        shrink: sizes are divided by it; verdicts are given at 1 alone.
        compiled: whether peers are compiled, which takes seconds for each.
    """

    rounds: int = 9
    warm: int = 10
    shrink: int = 1
    compiled: bool = True
    device: Literal["cpu", "cuda"] = "cpu"

    def size(self, full: int, least: int = 16) -> int:
        """The size in place of ``full``."""
        return max(full // self.shrink, min(full, least))


QUICK = Effort(rounds=3, warm=1, shrink=16, compiled=False)

Verdict = Literal["met", "within the gate", "missed", "no target", "not measured here"]

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
            return "not measured here"
        if self.sense == "at_most":
            return "met" if measured <= self.value else "missed"
        if measured >= self.value:
            return "met"
        return "within the gate" if measured >= GATE * self.value else "missed"

    def __str__(self) -> str:
        sign = ">=" if self.sense == "at_least" else "<="
        return f"{sign} {self.value:g} {self.unit}".strip()


def at_most(value: float, unit: str) -> Target:
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

    @property
    def verdict(self) -> Verdict:
        """What the table says."""
        if self.differs:
            return "missed"
        if self.target is None:
            return "no target" if self.measured is not None else "not measured here"
        return self.target.verdict(self.measured)

    @property
    def differs(self) -> bool:
        """Whether ours and the peer's are not the same result; nan is none."""
        if self.difference is None or self.most_difference is None:
            return False
        return not self.difference <= self.most_difference

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> Finding:
        """What :meth:`as_json` made."""
        target = held["target"]
        values = {k: v for k, v in held.items() if k not in ("verdict", "target")}
        return cls(target=None if target is None else Target(**target), **values)


class Measured(NamedTuple):
    """Lines of the table, and everything behind them, for the record."""

    findings: list[Finding]
    details: dict[str, Any]


Row = Callable[[Effort], Measured]
"""Measures an operation with its peers and targets."""
