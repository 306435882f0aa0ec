"""Scaling laws: the exponent of time and memory in a size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.interleaved import Work, peak_mib, take_turns
from benchmarks.speed.effort import Effort
from benchmarks.speed.target import Finding, Measured, Target, at_most

LEAST_SIZES = 4


class Law(NamedTuple):
    """How an operation grows.

    Attributes:
        label: with what.
        sizes: four or more.
        make: the operation at a size.
        time: exponent of its time.
        memory: exponent of its memory.
        most_growth: most memory at the largest size, as a ratio to that at the smallest.
    """

    label: str
    sizes: Sequence[int]
    make: Callable[[Effort, int], Work]
    time: Target | None = None
    memory: Target | None = None
    most_growth: float | None = None

    def measure(self, effort: Effort) -> Measured:
        """Times all sizes in turn."""
        sizes = [effort.size(n, least=n // effort.shrink or 1) for n in self.sizes]
        works = {str(n): self.make(effort, n) for n in sizes}
        seconds = take_turns(works, effort.rounds, effort.warm)
        times = [statistics.median(seconds[str(n)]) for n in sizes]
        memory = [peak_mib(works[str(n)], effort.device) for n in sizes]
        details: dict[str, Any] = {"sizes": sizes, "ms": [1e3 * t for t in times], "mib": memory}
        found = []
        for quantity, target, values in (
            ("time", self.time, times),
            ("memory", self.memory, memory),
        ):
            if target is not None:
                label = f"{self.label}: {quantity}"
                found.append(Finding(label, target, fitted_slope(sizes, values)))
        if self.most_growth is not None:
            label = f"{self.label}: memory at {self.sizes[-1]:,} over {self.sizes[0]:,}"
            found.append(Finding(label, at_most(self.most_growth, "x"), memory[-1] / memory[0]))
        return Measured(found, details)


def fitted_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope of ``log values`` over ``log sizes``.

    Args:
        sizes: four or more, above 0, not all the same.
        values: as many, above 0.

    Raises:
        ValueError: there are fewer, or a number is not above 0.
    """
    if len(sizes) < LEAST_SIZES or len(sizes) != len(values):
        raise ValueError(
            f"{len(sizes)} sizes and {len(values)} values: a slope needs as many of both, and "
            f"{LEAST_SIZES} or more"
        )
    if min(*sizes, *values) <= 0:
        raise ValueError(f"sizes {list(sizes)} and values {list(values)} must be above 0")
    x, y = [math.log(n) for n in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope
