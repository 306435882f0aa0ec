"""Two and four gloo processes equal one on the joined batch, in value and gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from solo_ext.core import distributed
from tests.losses import ranks

InProcesses = Callable[[Any, int], list[dict[str, Any]]]
exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module", params=[2, 4])
def results(in_processes: InProcesses, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two and of four processes computed."""
    return in_processes(ranks, request.param)


@pytest.mark.parametrize(
    "index", range(len(ranks.CASES)), ids=["-".join(map(str, c)) for c in ranks.CASES]
)
def test_losses(results: list[dict[str, Any]], index: int) -> None:
    case = ranks.CASES[index]
    alone = ranks.step(case)
    found = [ranks.Step(*result["steps"][index]) for result in results]
    exact(torch.stack([step.loss for step in found]).mean(), alone.loss)
    exact(torch.stack([step.note for step in found]).mean(0), alone.note)
    for step in found:
        exact(step.gradients, alone.gradients)
    largest = max(g.abs().max() for g in alone.gradients)
    if case.labels in ("no positives", "no negatives"):
        assert alone.loss == largest == 0
    else:
        # Two images at a low temperature are easily told apart.
        least = 0 if case.single else 1e-6
        assert alone.loss.abs() > least
        assert largest > least


def test_what_is_one_value_is_so_on_all_ranks(results: list[dict[str, Any]]) -> None:
    uniformity, protocpc = (ranks.CASES.index(ranks.Case(n)) for n in ("uniformity", "protocpc"))
    for index, place in ((uniformity, 0), (protocpc, 1)):
        first, *others = (result["steps"][index][place] for result in results)
        for other in others:
            exact(other, first)


def test_gathers_rank_by_rank(results: list[dict[str, Any]]) -> None:
    first, count = torch.arange(6.0).view(2, 3), range(len(results))
    joined = torch.cat([first + 100 * rank for rank in count])
    total = torch.stack([ranks.weights(rank) for rank in count]).sum(0)
    for rank, result in enumerate(results):
        found = result["gathers"]
        assert torch.equal(found["plain"], joined)
        assert not found["plain"].requires_grad
        assert torch.equal(found["with gradient"], joined)
        assert torch.equal(found["transposed"], torch.cat([first.T + 100 * r for r in count]))
        numbers = [number for r in count for number in (r, 10 + r)]
        assert torch.equal(found["integer"], torch.tensor(numbers))
        # Gradients of all ranks add up, and those of others are left alone.
        assert torch.equal(found["gradient"], total[2 * rank : 2 * rank + 2])
        assert torch.equal(found["gradient of bias"], 2 * ranks.weights(rank))
        every = len(results) * (len(results) + 1) / 2
        assert torch.equal(found["gradient of sum"], torch.full((2, 3), every))


def test_state_is_that_of_the_joined_batch(results: list[dict[str, Any]]) -> None:
    """Queue and support set, in every process, and on the first the bank."""
    alone, part = ranks.state(), ranks.state(slice(6))
    for name in ("queue.value", "support.value", "bank.value"):
        assert not torch.equal(alone[name], part[name])
    for rank, result in enumerate(results):
        assert result["state"].keys() == alone.keys()
        for name, value in alone.items():
            if rank and name in ("bank.value", "bank.filled"):
                assert torch.equal(result["state"][name], value[rank :: len(results)])
                continue
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-15)


@pytest.mark.parametrize("split", ranks.SPLITS)
def test_sinkhorn_and_prior(results: list[dict[str, Any]], split: str) -> None:
    """Also where the processes hold different numbers of samples."""
    first = ranks.parts(split)[0]
    for name in ranks.SCORES:
        found = [result["sinkhorn"][split, name] for result in results]
        assert tuple(map(len, found)) == ranks.SPLITS[split][len(results)]
        expected = ranks.assigned(name)
        exact(torch.cat(found), expected)
        assert (ranks.assigned(name, first) - expected[first]).abs().max() > 1e-3
    for result in results:
        exact(result["prior"][split], ranks.prior())
    assert (ranks.prior(first) - ranks.prior()).abs().max() > 1e-3


def test_one_process_gathers_itself() -> None:
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    assert distributed.gather(x) is x
    (distributed.gather_with_gradient(x) * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))
