"""Targets and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["met", "within the gate", "missed", "no target", "not measured here"]

GATE = 0.85
"""Share of a ratio that a change must not fall below."""

_SIGNS = {"at_least": ">=", "at_most": "<=", "near": "+-"}


@dataclass(frozen=True)
class Target:
    """What a number is to be.

    Attributes:
        value: that number.
        sense: ``at_least`` (of ratios of time and memory, with a gate), ``at_most``, or ``near``.
        unit: printed after it.
        tolerance: how far from ``value`` is still ``near``.
    """

    value: float
    sense: Literal["at_least", "at_most", "near"] = "at_least"
    unit: str = "x"
    tolerance: float = 0.0

    def verdict(self, measured: float | None) -> Verdict:
        """Whether ``measured`` is as it should be; ``None`` is a number that there is not."""
        if measured is None:
            return "not measured here"
        if self.sense == "at_most":
            return "met" if measured <= self.value else "missed"
        if self.sense == "near":
            return "met" if abs(measured - self.value) <= self.tolerance else "missed"
        if measured >= self.value:
            return "met"
        return "within the gate" if measured >= GATE * self.value else "missed"

    def __str__(self) -> str:
        number = f"{self.value:g}"
        if self.sense == "near":
            return f"{number} +- {self.tolerance:g} {self.unit}".strip()
        return f"{_SIGNS[self.sense]} {number} {self.unit}".strip()


def at_most(value: float, unit: str) -> Target:
    """A number that is not to be exceeded."""
    return Target(value, "at_most", unit)


def slope(value: float, tolerance: float = 0.15, *, at_most: bool = False) -> Target:
    """An exponent of a power law; with ``at_most`` any below will do."""
    if at_most:
        return Target(value + tolerance, "at_most", "slope")
    return Target(value, "near", "slope", tolerance)
