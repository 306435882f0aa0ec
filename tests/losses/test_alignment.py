"""Alignment and uniformity against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import alignment_loss_func, uniformity_loss_func

DRAWN = settings(deadline=None, max_examples=30)


def make(count: int, seed: int, dim: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64).requires_grad_()


def close(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Compares values and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    one, two = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


@DRAWN
@given(count=st.integers(1, 6), seed=st.integers(0, 999), alpha=st.floats(0.3, 4))
def test_alignment_equals_the_loop(count: int, seed: int, alpha: float) -> None:
    x, y = make(count, seed), make(count, seed + 1000)
    terms = [(x[i] - y[i]).square().sum() ** (alpha / 2) for i in range(count)]
    close(alignment_loss_func(x, y, alpha), torch.stack(terms).mean(), x, y)


@DRAWN
@given(count=st.integers(2, 7), seed=st.integers(0, 999), t=st.floats(0.1, 4))
def test_uniformity_equals_the_loop(count: int, seed: int, t: float) -> None:
    x = make(count, seed)
    terms = [
        (-t * (x[i] - x[j]).square().sum()).exp() for i in range(count) for j in range(i + 1, count)
    ]
    close(uniformity_loss_func(x, t), torch.stack(terms).mean().log(), x)


def test_gradcheck() -> None:
    x, y = make(5, 0), make(5, 1)
    for alpha in (1, 2, 2.5):
        assert torch.autograd.gradcheck(lambda a, b, p=alpha: alignment_loss_func(a, b, p), (x, y))
    assert torch.autograd.gradcheck(uniformity_loss_func, x)


def test_points_evenly_on_the_circle_are_most_uniform() -> None:
    angles = torch.arange(6).double() * math.tau / 6
    even = torch.stack((angles.cos(), angles.sin()), dim=1).requires_grad_()
    loss = uniformity_loss_func(F.normalize(even, dim=1))
    assert torch.autograd.grad(loss, even)[0].abs().max() < 1e-12
    for seed in range(5):
        assert uniformity_loss_func(F.normalize(make(6, seed, 2), dim=1)) > loss


def test_collapsed_rows() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    for loss in (alignment_loss_func(x, torch.ones(4, 3)), uniformity_loss_func(x)):
        assert loss.item() == pytest.approx(0, abs=1e-6)
        assert not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize("alpha", [0.5, 1, 2])
def test_equal_rows_have_gradient_zero_at_every_power(alpha: float) -> None:
    x = make(3, 0)
    y = x.detach().clone()
    y[1] += 1
    (gradient,) = torch.autograd.grad(alignment_loss_func(x, y, alpha), x)
    assert (gradient != 0).any(1).tolist() == [False, True, False]


def test_far_rows_do_not_underflow() -> None:
    x = torch.tensor([[0.0], [30.0], [100.0]], requires_grad=True)
    loss = uniformity_loss_func(x)
    assert loss.item() == pytest.approx(-1800 - math.log(3), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, x)
    expected = torch.tensor([[120.0], [-120.0], [0.0]])
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=0)


def test_a_single_row_gives_zero_on_the_graph() -> None:
    x = make(1, 0)
    loss = uniformity_loss_func(x)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, x)[0].any()


@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_refuses_settings(value: float) -> None:
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match=f"alpha={value}"):
        alignment_loss_func(x, x, value)
    with pytest.raises(ValueError, match=f"t={value}"):
        uniformity_loss_func(x, value)


def test_refuses_shapes() -> None:
    x = torch.ones(3, 2)
    for y in (x[:2], x[:, :1], x[0]):
        with pytest.raises(ValueError, match=r"\(N, D\)"):
            alignment_loss_func(x, y)
    with pytest.raises(ValueError, match=r"x must be \(N, D\)"):
        uniformity_loss_func(x[0])
