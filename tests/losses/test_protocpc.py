"""ProtoCPC from logits: against a loop over Algorithm 1, identities and edges."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.losses import LOSSES, protocpc_loss_func

N, K = 5, 7


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, N, K, generator=generator, dtype=torch.float64).tanh()
    prior = torch.rand(K, generator=generator, dtype=torch.float64) + 0.1
    return logits, (teacher / 0.3).softmax(1), K * prior / prior.sum()


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_equals_the_loop(temperature: float) -> None:
    logits, probs, prior = inputs()
    total = 0.0
    for i in range(N):
        s = [float(x) / temperature for x in logits[i]]
        align = -sum(float(p) * x for p, x in zip(probs[i], s, strict=True))
        total += align + math.log(
            sum(float(q) * math.exp(x) for q, x in zip(prior, s, strict=True))
        )
    found = protocpc_loss_func(logits, probs, prior, temperature)
    assert float(found) == pytest.approx(total / N, rel=1e-12)


def test_flat_prior_is_soft_cross_entropy() -> None:
    logits, probs, _ = inputs()
    found = protocpc_loss_func(logits, probs, torch.ones(K), 0.2)
    torch.testing.assert_close(found, F.cross_entropy(logits / 0.2, probs))


def test_scaling_the_prior_moves_the_loss_alone() -> None:
    logits, probs, prior = inputs()
    logits.requires_grad_()
    one, lower = (protocpc_loss_func(logits, probs, q) for q in (prior, prior / K))
    torch.testing.assert_close(one - lower, torch.tensor(math.log(K)).double())
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (one, lower)]
    torch.testing.assert_close(*gradients)


def test_shifting_a_sample_changes_nothing() -> None:
    logits, probs, prior = inputs()
    shifted = logits + torch.arange(1.0, N + 1).unsqueeze(1)
    found = (protocpc_loss_func(x, probs, prior) for x in (logits, shifted))
    torch.testing.assert_close(*found)


def test_gradient_is_weighted_softmax_less_target() -> None:
    logits, probs, prior = inputs()
    logits.requires_grad_()
    (found,) = torch.autograd.grad(protocpc_loss_func(logits, probs, prior, 0.1), logits)
    expected = ((logits / 0.1 + prior.log()).softmax(1) - probs) / (0.1 * N)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(lambda x: protocpc_loss_func(x, probs, prior, 0.5), logits)


def test_targets_and_prior_are_constants() -> None:
    logits, probs, prior = (x.requires_grad_() for x in inputs())
    protocpc_loss_func(logits, probs, prior).backward()
    assert logits.grad is not None
    assert probs.grad is prior.grad is None


def test_an_unused_prototype_is_still_pushed_away() -> None:
    logits, probs, prior = inputs()
    prior[2] = 0
    logits.requires_grad_()
    loss = protocpc_loss_func(logits, probs, prior)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    prior[2] = 1e-8
    assert torch.equal(loss, protocpc_loss_func(logits, probs, prior))


def test_autocast_computes_in_single_precision() -> None:
    logits, probs, prior = (x.float() for x in inputs())
    expected = protocpc_loss_func(logits.bfloat16().float(), probs, prior)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = protocpc_loss_func(logits.bfloat16(), probs, prior)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("temperature", [1e-3, 1e3])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits, probs, prior = (x.float() for x in inputs())
    logits.requires_grad_()
    loss = protocpc_loss_func(logits, probs, prior, temperature)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_is_registered() -> None:
    entry = LOSSES["protocpc_loss_func"]
    assert entry.target is protocpc_loss_func
    assert entry.year == 2021
    assert entry.arxiv == ""


def test_refuses() -> None:
    logits, probs, prior = inputs()
    with pytest.raises(ValueError, match=r"must both be \(N, K\), got \(5, 7\) and \(5, 6\)"):
        protocpc_loss_func(logits, probs[:, 1:], prior)
    with pytest.raises(ValueError, match=r"prior must be \(7,\), one per prototype, got \(6,\)"):
        protocpc_loss_func(logits, probs, prior[1:])
    with pytest.raises(ValueError, match=r"temperature=0: must be above 0"):
        protocpc_loss_func(logits, probs, prior, 0)
