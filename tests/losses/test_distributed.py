"""Two gloo processes equal one on the joined batch, in value and gradient."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext import distributed

InProcesses = Callable[[Any], list[dict[str, Any]]]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ranks: Any = importlib.import_module("two_ranks")
sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def results(in_processes: InProcesses) -> list[dict[str, Any]]:
    """What each of the two processes computed."""
    return in_processes(ranks)


@pytest.mark.parametrize(
    "index", range(len(ranks.CASES)), ids=["-".join(map(str, c)) for c in ranks.CASES]
)
def test_two_processes_equal_one(results: list[dict[str, Any]], index: int) -> None:
    case = ranks.CASES[index]
    alone = ranks.step(case, ranks.network())
    found = [ranks.Step(*result["steps"][index]) for result in results]
    loss = torch.stack([step.loss for step in found]).mean()
    torch.testing.assert_close(loss, alone.loss, rtol=0, atol=1e-12)
    floored = torch.stack([step.floored for step in found]).mean()
    torch.testing.assert_close(floored, alone.floored, rtol=0, atol=1e-12)
    assert alone.loss > 1e-6
    assert max(g.abs().max() for g in alone.gradients) > 1e-6
    for step in found:
        assert len(step.gradients) == len(alone.gradients) == 4
        for gradient, expected in zip(step.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_knows_its_rank(results: list[dict[str, Any]]) -> None:
    assert [r["gathers"]["rank"] for r in results] == [0, 1]
    assert [r["gathers"]["world_size"] for r in results] == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_gathers_rank_by_rank(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]["gathers"]
    first = torch.arange(6.0).view(2, 3)
    joined = torch.cat((first, first + 100))
    assert torch.equal(found["plain"], joined)
    assert torch.equal(found["with gradient"], joined)
    assert torch.equal(found["leaf"], joined)
    assert not found["leaf"].requires_grad
    assert torch.equal(found["transposed"], torch.cat((first.T, first.T + 100)))
    assert torch.equal(found["integer"], torch.tensor([0, 10, 1, 11]))


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_of_all_ranks_add_up(results: list[dict[str, Any]], rank: int) -> None:
    found = results[rank]["gathers"]
    own = slice(2 * rank, 2 * rank + 2)
    total = ranks.weights(0) + ranks.weights(1)
    assert torch.equal(found["gradient"], total[own])
    assert torch.equal(found["gradient of sum"], torch.full((2, 3), 3.0))


@pytest.mark.parametrize("rank", [0, 1])
def test_gather_leaves_the_gradients_of_others_alone(
    results: list[dict[str, Any]], rank: int
) -> None:
    found = results[rank]["gathers"]
    assert torch.equal(found["gradient of bias"], 2 * ranks.weights(rank))
    own = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(found["gradient beside bias"], (ranks.weights(0) + ranks.weights(1))[own])


def test_one_process_gathers_itself() -> None:
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    assert distributed.gather(x) is x
    (distributed.gather_with_gradient(x) * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))
