"""The prior over prototypes: what it holds, and that a checkpoint brings it back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from solo_ext.memory import PrototypePrior, sinkhorn
from solo_ext.memory.state import keep_out_of_broadcast


def probabilities(seed: int, rows: int = 6, width: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, width, generator=generator)).softmax(1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.999, 1.0])
def test_is_the_running_mean_times_k(momentum: float) -> None:
    prior, expected = PrototypePrior(5, momentum), [1.0] * 5
    for seed, rows in enumerate((6, 2, 9)):
        probs = probabilities(seed, rows)
        for k in range(5):
            mean = sum(float(p[k]) for p in probs) / rows
            expected[k] = momentum * expected[k] + (1 - momentum) * 5 * mean
        prior.update_(probs)
        torch.testing.assert_close(prior.value, torch.tensor(expected))


def test_always_sums_to_k() -> None:
    prior = PrototypePrior(50, 0.9)
    for seed in range(200):
        prior.update_(probabilities(seed, 4, 50))
    torch.testing.assert_close(prior.value.sum(), torch.tensor(50.0), rtol=1e-5, atol=0)


def test_peek_changes_nothing_and_commit_takes_it() -> None:
    prior, probs = PrototypePrior(5), probabilities(0)
    held = prior.value
    seen = prior.peek(probs)
    assert torch.equal(prior.value, torch.ones(5))
    prior.commit_(seen)
    assert prior.value is held
    assert torch.equal(held, seen)
    assert not torch.equal(seen, torch.ones(5))


def test_is_a_constant() -> None:
    prior, logits = PrototypePrior(5), torch.randn(4, 5, requires_grad=True)
    assert not prior.peek(logits.softmax(1)).requires_grad
    prior.update_(logits.softmax(1))
    assert not prior.value.requires_grad
    assert not list(prior.parameters())


def test_checkpoint_brings_it_back() -> None:
    prior, restored = PrototypePrior(5), PrototypePrior(5)
    prior.update_(probabilities(0))
    restored.load_state_dict(prior.state_dict())
    assert torch.equal(restored.value, prior.value)
    assert torch.equal(restored.peek(probabilities(1)), prior.peek(probabilities(1)))


def test_ddp_leaves_it_alone() -> None:
    model = nn.ModuleDict({"prior": PrototypePrior(5)})
    keep_out_of_broadcast(model)
    assert model._ddp_params_and_buffers_to_ignore == ["prior.value"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stays_in_single_precision(dtype: torch.dtype) -> None:
    prior, other = PrototypePrior(5), nn.Linear(2, 2)
    prior.update_(probabilities(0))
    before = prior.value.clone()
    nn.ModuleList((prior, other)).to(dtype)
    assert other.weight.dtype == dtype
    assert prior.value.dtype == torch.float32
    assert torch.equal(prior.value, before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = prior.peek(probabilities(1).to(dtype))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(), torch.tensor(5.0), rtol=2e-3, atol=0)


def test_runs_without_looking_at_values() -> None:
    prior = PrototypePrior(5).to("meta")
    prior.update_(sinkhorn(torch.empty(3, 5, device="meta")))
    assert prior.value.is_meta


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"momentum=1.5: must be in \[0, 1\]"):
        PrototypePrior(5, 1.5)
    with pytest.raises(ValueError, match=r"num_prototypes=0: must be 1 or more"):
        PrototypePrior(0)
    with pytest.raises(ValueError, match=r"must be \(N, 5\), got \(2, 4\)"):
        PrototypePrior(5).peek(torch.ones(2, 4))
