"""Two and four gloo processes equal one on the joined batch, in value and gradient."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.core import distributed

InProcesses = Callable[[Any, int], list[dict[str, Any]]]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ranks: Any = importlib.import_module("contrastive_ranks")
sys.path.remove(str(HERE))
VALUES = ("queue.value", "support.value", "bank.value", "cache.value", "prior.value")


@pytest.fixture(scope="module", params=[2, 4])
def results(in_processes: InProcesses, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two and of four processes computed."""
    return in_processes(ranks, request.param)


@pytest.mark.parametrize(
    "index", range(len(ranks.CASES)), ids=["-".join(map(str, c)) for c in ranks.CASES]
)
def test_processes_equal_one(results: list[dict[str, Any]], index: int) -> None:
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
    count = len(results)
    assert [r["gathers"]["rank"] for r in results] == list(range(count))
    assert [r["gathers"]["world_size"] for r in results] == [count] * count


def test_gathers_rank_by_rank(results: list[dict[str, Any]]) -> None:
    first, count = torch.arange(6.0).view(2, 3), range(len(results))
    joined = torch.cat([first + 100 * rank for rank in count])
    numbers = [number for rank in count for number in (rank, 10 + rank)]
    for result in results:
        found = result["gathers"]
        assert torch.equal(found["plain"], joined)
        assert torch.equal(found["with gradient"], joined)
        assert torch.equal(found["leaf"], joined)
        assert not found["leaf"].requires_grad
        assert torch.equal(found["transposed"], torch.cat([first.T + 100 * r for r in count]))
        assert torch.equal(found["integer"], torch.tensor(numbers))


def test_gradients_of_all_ranks_add_up(results: list[dict[str, Any]]) -> None:
    count = len(results)
    total = torch.stack([ranks.weights(rank) for rank in range(count)]).sum(0)
    for rank, result in enumerate(results):
        found, own = result["gathers"], slice(2 * rank, 2 * rank + 2)
        assert torch.equal(found["gradient"], total[own])
        expected = torch.full((2, 3), count * (count + 1) / 2)
        assert torch.equal(found["gradient of sum"], expected)
        # And those of others are left alone.
        assert torch.equal(found["gradient of bias"], 2 * ranks.weights(rank))
        assert torch.equal(found["gradient beside bias"], total[own])


def test_state_is_that_of_the_joined_batch(results: list[dict[str, Any]]) -> None:
    """Queue, support set, bank, cache and prior, in every process."""
    alone = ranks.state()
    assert len(alone) >= 10
    assert not any(torch.equal(alone[name], ranks.state(slice(6))[name]) for name in VALUES)
    for result in results:
        assert result["state"].keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-15)


def test_one_process_gathers_itself() -> None:
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    assert distributed.gather(x) is x
    (distributed.gather_with_gradient(x) * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))
