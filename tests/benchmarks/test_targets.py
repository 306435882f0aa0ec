"""Verdicts, and the exponents of scaling laws."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.interleaved import Work
from benchmarks.speed.effort import Effort
from benchmarks.speed.law import Law, fitted_slope
from benchmarks.speed.record import cells
from benchmarks.speed.target import Finding, Target, at_most, slope

SIZES = [1000, 2000, 4000, 8000]


@pytest.mark.parametrize(
    ("target", "measured", "verdict"),
    [
        (Target(2.0), 2.0, "met"),
        (Target(2.0), 1.99, "within the gate"),
        (Target(2.0), 1.7, "within the gate"),
        (Target(2.0), 1.69, "missed"),
        (Target(2.0), None, "not measured here"),
        (Target(2.0), math.inf, "met"),
        # No gate here: 15 % of a step is no noise.
        (at_most(1.02, "x"), 1.02, "met"),
        (at_most(1.02, "x"), 1.03, "missed"),
        (at_most(0, ""), 0.0, "met"),
        (at_most(0, ""), 1.0, "missed"),
        (slope(1), 1.15, "met"),
        (slope(1), 1.16, "missed"),
        (slope(1), 0.84, "missed"),
        (slope(1, at_most=True), 0.5, "met"),
        (slope(1, at_most=True), 1.16, "missed"),
        (slope(0), -0.1, "met"),
    ],
)
def test_verdict(target: Target, measured: float | None, verdict: str) -> None:
    assert target.verdict(measured) == verdict


def test_no_target() -> None:
    assert Finding("a", None, 2.0).verdict == "no target"
    assert Finding("a", None, note="peer not installed: b").verdict == "not measured here"


def test_growth_is_of_the_ends() -> None:
    def make(_: Effort, size: int) -> Work:
        return lambda: torch.ones(2**18 + (2**17 if size == 8 else 0))

    law = Law("ones", (1, 2, 4, 8), make, most_growth=1.1)
    (finding,) = law.measure(Effort(rounds=1, warm=1)).findings
    assert finding.label == "ones: memory at 8 over 1"
    assert finding.measured == pytest.approx(1.5, abs=1e-2)
    assert finding.verdict == "missed"


def test_findings_survive_json() -> None:
    finding = Finding(
        "a", slope(1), 1.5, ours="b", peer="c", again=1.1, memory=3.0, difference=0.1, note="d"
    )
    held = finding.as_json()
    assert held["verdict"] == "missed"
    assert Finding.from_json(held) == finding


def test_quick_tables_judge_nothing() -> None:
    finding = Finding("a", Target(2.0), 1.0)
    assert "missed" in cells(finding)
    assert "missed" not in cells(finding, verdicts=False)


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_slope_of_a_power(exponent: float) -> None:
    values = [3.0 * n**exponent for n in SIZES]
    assert fitted_slope(SIZES, values) == pytest.approx(exponent)


def test_slope_is_of_all_sizes() -> None:
    # Twofold at one end alone: neither 0 nor the slope of the ends, 1/3.
    assert fitted_slope(SIZES, [1, 1, 1, 2]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("sizes", "values"),
    [(SIZES[:3], [1, 2, 3]), (SIZES, [1, 2, 3]), (SIZES, [1, 2, 3, 0]), ([0, 1, 2, 3], SIZES)],
)
def test_refused(sizes: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"needs as many|above 0"):
        fitted_slope(sizes, values)
