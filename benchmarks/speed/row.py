"""What a row of the table is."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from benchmarks.speed.effort import Effort
from benchmarks.speed.finding import Finding


class Measured(NamedTuple):
    """What measuring a row gives.

    Attributes:
        findings: lines of the table.
        details: everything behind them, for the record.
    """

    findings: list[Finding]
    details: dict[str, Any]


class Row(Protocol):
    """An operation with its peers and targets."""

    @property
    def name(self) -> str:
        """For ``--rows``."""

    def measure(self, effort: Effort) -> Measured:
        """Measures all of it."""
