"""What a training step asks of the host does not grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.steps import BASES, TABLE, count_steps, grown, made_by, methods

ROOT = Path(__file__).parents[2]
MORE = 0.03
"""Share by which a count may be above the table."""


@pytest.fixture(scope="session")
def held() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / TABLE).read_text())
    return record


def test_every_method_is_in_the_table(held: dict[str, Any]) -> None:
    assert sorted(held["methods"]) == sorted(methods())
    assert set(BASES) | set(BASES.values()) <= set(held["methods"])


@pytest.mark.slow
@pytest.mark.parametrize("method", methods())
def test_a_step_does_not_grow(method: str, held: dict[str, Any]) -> None:
    """After a change that is worth it: `python -m benchmarks.steps --write`."""
    others = {k: v for k, v in made_by().items() if held[k] != v}
    if others:
        pytest.skip(f"the table was counted with other versions of {', '.join(others)}")
    found = count_steps([method])
    assert grown(found, held["methods"], MORE) == []


def test_growth_is_seen() -> None:
    table = {"pcl": {"launches": 100, "waits": 0, "calls": 1000}}
    assert grown({"pcl": {"launches": 103, "waits": 0, "calls": 1030}}, table, MORE) == []
    assert len(grown({"pcl": {"launches": 104, "waits": 1, "calls": 1031}}, table, MORE)) == 3
