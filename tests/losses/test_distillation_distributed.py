"""Sinkhorn, the prior and the ProtoCPC step of two and four gloo processes equal those of one."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

InProcesses = Callable[[Any, int], list[dict[str, Any]]]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ranks: Any = importlib.import_module("distillation_ranks")
sys.path.remove(str(HERE))
exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module", params=[2, 4])
def results(in_processes: InProcesses, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two and of four processes computed."""
    return in_processes(ranks, request.param)


@pytest.mark.parametrize("split", ranks.SPLITS)
@pytest.mark.parametrize("name", ranks.SCORES)
def test_sinkhorn(results: list[dict[str, Any]], name: str, split: str) -> None:
    """Also where the processes hold different numbers of samples."""
    found = [result["sinkhorn"][split, name] for result in results]
    assert tuple(map(len, found)) == ranks.SPLITS[split][len(results)]
    expected = ranks.assigned(name)
    exact(torch.cat(found), expected)
    first = ranks.parts(split)[0]
    assert (ranks.assigned(name, first) - expected[first]).abs().max() > 1e-3


@pytest.mark.parametrize("split", ranks.SPLITS)
def test_prior(results: list[dict[str, Any]], split: str) -> None:
    expected = ranks.prior()
    for result in results:
        exact(result["prior"][split], expected)
    assert (ranks.prior(ranks.parts(split)[0]) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ranks.STEPS)
def test_step(results: list[dict[str, Any]], name: str) -> None:
    alone, found = ranks.step(name), [result["step"][name] for result in results]
    loss = torch.stack([f["loss"] for f in found]).mean()
    exact(loss, alone["loss"])
    student = torch.cat([f["student"] for f in found], dim=1) / ranks.RANKS
    exact(student, alone["student"])
    assert alone["student"].abs().max() > 1e-3
    assert alone["prototypes"].abs().max() > 1e-3
    for own in found:
        exact(own["prototypes"], alone["prototypes"])
        exact(own["prior"], alone["prior"])


def test_prior_of_an_uneven_step(results: list[dict[str, Any]]) -> None:
    expected = ranks.step("paper")["prior"]
    for result in results:
        exact(result["uneven prior"], expected)
