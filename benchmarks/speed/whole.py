"""A row that is no set of calls: processes, runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.speed.effort import Effort
from benchmarks.speed.row import Measured


@dataclass(frozen=True)
class Whole:
    """A row that measures itself.

    Attributes:
        name: for ``--rows``.
        function: measures.
    """

    name: str
    function: Callable[[Effort], Measured]

    def measure(self, effort: Effort) -> Measured:
        """Measures all of it."""
        return self.function(effort)
