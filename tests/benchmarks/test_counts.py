"""What a training step asks of the host does not grow."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.page import RESULTS
from benchmarks.record import Effort, Record
from benchmarks.rows import ROWS
from benchmarks.rows.counts import BASES, count_steps, grown, measure, methods
from solo_ext.lab.training.run_dir import environment


@pytest.fixture(scope="session")
def held() -> dict[str, Any]:
    return Record(RESULTS / "cpu.jsonl").rows["counts"]


def test_every_method_is_in_the_record(held: dict[str, Any]) -> None:
    assert sorted(held["details"]) == sorted(methods())
    assert set(BASES) | set(BASES.values()) <= set(held["details"])


@pytest.mark.slow
@pytest.mark.parametrize("method", methods())
def test_a_step_does_not_grow(method: str, held: dict[str, Any]) -> None:
    """After a change that is worth it: `python -m benchmarks counts --write`."""
    then, now = held["environment"], environment()
    others = [n for n in ("torch", "lightning") if then["packages"][n] != now["packages"][n]]
    if others or then["host"]["generation"] != now["host"]["generation"]:
        pytest.skip("counted with another version of torch, Lightning or solo-learn")
    if then["python"].split(".")[:2] != now["python"].split(".")[:2]:
        pytest.skip("counted with another version of Python")
    assert grown(count_steps([method]), held["details"]) == []


def test_growth_is_seen() -> None:
    table = {"pcl": {"launches": 100, "waits": 0, "copies": 0, "calls": 1000}}
    assert grown({"pcl": {"launches": 103, "waits": 0, "copies": 0, "calls": 1030}}, table) == []
    assert (
        len(grown({"pcl": {"launches": 104, "waits": 1, "copies": 1, "calls": 1031}}, table)) == 4
    )


@pytest.mark.slow
def test_a_method_is_beside_its_base() -> None:
    assert ROWS["counts"] is measure
    findings, details = measure(Effort(shrink=64))
    of_ours = [f for f in findings if f.peer == "simclr"]
    assert len(of_ours) == 6
    launches = {name: found["launches"] for name, found in details.items()}
    over = launches["hard_negative"] / launches["simclr"]
    assert of_ours[0].measured == launches["hard_negative"]
    assert of_ours[0].note.startswith(f"{over:.2f} ")
    targets = ["no target", "met", "met", *["no target"] * 3]
    assert [f.verdict for f in of_ours] == targets
    assert details["simclr"]["launches_beside_graph"] < launches["simclr"] / 4
