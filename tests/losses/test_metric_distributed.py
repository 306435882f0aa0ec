"""The classical losses of two and four gloo processes equal those of one on the joined batch."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

InProcesses = Callable[[Any, int], list[dict[str, Any]]]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ranks: Any = importlib.import_module("metric_ranks")
sys.path.remove(str(HERE))


@pytest.fixture(scope="module", params=[2, 4])
def results(in_processes: InProcesses, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two and of four processes computed."""
    return in_processes(ranks, request.param)


@pytest.mark.parametrize("index", range(len(ranks.CASES)), ids=[" - ".join(c) for c in ranks.CASES])
def test_processes_equal_one(results: list[dict[str, Any]], index: int) -> None:
    name, kind = ranks.CASES[index]
    alone = ranks.step(name, *ranks.joined_batch(kind))
    found = [ranks.Step(*result["steps"][index]) for result in results]
    loss = torch.stack([step.loss for step in found]).mean()
    torch.testing.assert_close(loss, alone.loss, rtol=1e-12, atol=1e-12)
    for step in found:
        torch.testing.assert_close(step.gradients, alone.gradients, rtol=0, atol=1e-12)
    largest = max(g.abs().max() for g in alone.gradients)
    if kind in ("no positives", "no negatives"):
        assert loss == largest == 0
    else:
        assert loss.abs() > 1e-3
        assert largest > 1e-3


def test_uniformity_is_one_value_on_all_ranks(results: list[dict[str, Any]]) -> None:
    index = ranks.CASES.index(("uniformity", "mixed"))
    first, *others = (result["steps"][index][0] for result in results)
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=1e-12)
