"""Noise-contrastive estimation against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import LOSSES, nce_loss_func


def make(count: int, noise: int | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count,) if noise is None else (count, noise)
    data = torch.randn(count, generator=generator, dtype=torch.float64)
    other = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (3 * data).requires_grad_(), (3 * other).requires_grad_()


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 5), noise=st.none() | st.integers(0, 4), seed=st.integers(0, 999))
def test_equals_the_loop(count: int, noise: int | None, seed: int) -> None:
    data, other = make(count, noise, seed)
    total = data.new_zeros(())
    for i in range(count):
        total = total - (1 / (1 + (-data[i]).exp())).log()
        for logit in other[i].reshape(-1):
            total = total - (1 - 1 / (1 + (-logit).exp())).log()
    found, expected = nce_loss_func(data, other), total / count
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    one = torch.autograd.grad(found, (data, other))
    # Without noise samples the loop's sum does not reach them.
    two = torch.autograd.grad(expected + 0 * other.sum(), (data, other))
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-11)


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(nce_loss_func, make(4, 3))
    assert torch.autograd.gradcheck(nce_loss_func, make(4, None))


def test_one_sample_of_noise_may_have_its_own_axis() -> None:
    data, noise = make(5, None)
    found = nce_loss_func(data, noise.unsqueeze(1))
    torch.testing.assert_close(found, nce_loss_func(data, noise))


def test_is_least_at_the_true_ratio() -> None:
    """Data and noise on three points; the logits that minimise are log(p / q)."""
    p, q = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float64)
    counts = (1000 * p).round().int(), (1000 * q).round().int()
    places = [torch.arange(3).repeat_interleave(n) for n in counts]
    logits = (p / q).log().requires_grad_()
    loss = nce_loss_func(logits[places[0]], logits[places[1]])
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-12
    assert nce_loss_func(logits[places[0]] + 0.1, logits[places[1]] + 0.1) > loss


@pytest.mark.parametrize("size", [25.0, 1e4, 1e30])
def test_large_logits(size: float) -> None:
    """A confident error costs what the logit says, a confident success nothing."""
    data = torch.tensor([size, -size], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([-size, size], dtype=torch.float64, requires_grad=True)
    loss = nce_loss_func(data, noise)
    slack = 2 * math.log1p(math.exp(-size))
    assert loss.item() == pytest.approx(size + slack, rel=1e-15)
    gradients = torch.cat(torch.autograd.grad(loss, (data, noise)))
    expected = torch.tensor([0, -0.5, 0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)


def test_refuses_shapes() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"data_logits must be \(N,\)"):
        nce_loss_func(torch.ones(3, 1), x)
    for noise in (torch.ones(2), torch.ones(2, 3), torch.ones(3, 1, 1), torch.ones(())):
        with pytest.raises(ValueError, match=r"noise_logits must be \(3,\) or \(3, K\)"):
            nce_loss_func(x, noise)


def test_is_registered() -> None:
    assert LOSSES["nce_loss_func"].target is nce_loss_func
