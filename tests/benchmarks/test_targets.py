"""Verdicts, and what the table says of them."""

from __future__ import annotations

import math

import pytest

from benchmarks.speed.record import cells
from benchmarks.speed.target import Finding, Target, at_most


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
    ],
)
def test_verdict(target: Target, measured: float | None, verdict: str) -> None:
    assert target.verdict(measured) == verdict


def test_no_target() -> None:
    assert Finding("a", None, 2.0).verdict == "no target"
    assert Finding("a", None, note="peer not installed: b").verdict == "not measured here"


def test_findings_survive_json() -> None:
    finding = Finding(
        "a",
        at_most(1, "x"),
        1.5,
        ours="b",
        peer="c",
        again=1.1,
        memory=3.0,
        difference=0.1,
        note="d",
    )
    held = finding.as_json()
    assert held["verdict"] == "missed"
    assert Finding.from_json(held) == finding


def test_quick_tables_judge_nothing() -> None:
    finding = Finding("a", Target(2.0), 1.0)
    assert "missed" in cells(finding)
    assert "missed" not in cells(finding, verdicts=False)
