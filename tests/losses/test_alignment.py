"""Alignment, uniformity, effective rank and spread against their formulas."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import alignment_loss_func, uniformity_loss_func
from solo_ext.losses.alignment import effective_rank, spread
from tests.losses.conftest import same

DRAWN = settings(deadline=None, max_examples=30)


def make(count: int, seed: int, dim: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64).requires_grad_()


close = partial(same, values=(1e-9, 1e-11), slopes=(1e-8, 1e-10))


@DRAWN
@given(count=st.integers(1, 6), seed=st.integers(0, 999), alpha=st.floats(0.3, 4))
def test_alignment_equals_the_loop(count: int, seed: int, alpha: float) -> None:
    x, y = make(count, seed), make(count, seed + 1000)
    terms = [(x[i] - y[i]).square().sum() ** (alpha / 2) for i in range(count)]
    close(alignment_loss_func(x, y, alpha), torch.stack(terms).mean(), (x, y))


@DRAWN
@given(count=st.integers(2, 7), seed=st.integers(0, 999), t=st.floats(0.1, 4))
def test_uniformity_equals_the_loop(count: int, seed: int, t: float) -> None:
    x = make(count, seed)
    terms = [
        (-t * (x[i] - x[j]).square().sum()).exp() for i in range(count) for j in range(i + 1, count)
    ]
    close(uniformity_loss_func(x, t), torch.stack(terms).mean().log(), x)


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


@pytest.mark.parametrize("value", [0, math.nan])
def test_refuses(value: float) -> None:
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match=f"alpha={value}"):
        alignment_loss_func(x, x, value)
    with pytest.raises(ValueError, match=f"t={value}"):
        uniformity_loss_func(x, value)
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        alignment_loss_func(x, x[:2])


def rows(count: int = 9, dim: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64)


def with_values(values: list[float], count: int = 9) -> Tensor:
    """A matrix with these singular values."""
    left, _ = torch.linalg.qr(rows(count, len(values), 1))
    right, _ = torch.linalg.qr(rows(len(values), len(values), 2))
    return left * torch.tensor(values, dtype=torch.float64) @ right.T


@pytest.mark.parametrize(
    "values", [[1.0, 1.0, 1.0], [3.0, 2.0, 1.0], [5.0, 0.1, 1e-3], [2.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
)
def test_equals_the_definition(values: list[float]) -> None:
    shares = [value / sum(values) for value in values]
    expected = math.exp(-sum(p * math.log(p) for p in shares if p > 0))
    assert effective_rank(with_values(values)).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "dim"), [(1, 5), (4, 3), (64, 32), (3, 40)])
def test_collapsed_and_zero_rows_have_rank_one(count: int, dim: int, dtype: torch.dtype) -> None:
    collapsed = F.normalize(rows(1, dim), dim=1).expand(count, dim).to(dtype)
    assert effective_rank(collapsed).item() == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.zeros(count, dim, dtype=dtype)).item() == 1
    assert effective_rank(1e-30 * collapsed).item() == pytest.approx(1, abs=1e-3)


def test_spread() -> None:
    """Of constant rows 0, of isotropic ones 1, of those in a few directions in between."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 64, generator=generator)
    assert spread(x).item() == pytest.approx(1, abs=0.01)
    assert spread(torch.ones(20, 64)).item() == pytest.approx(0, abs=1e-6)
    assert spread(torch.zeros(20, 64)).item() == 0
    flat = torch.cat([x[:, :16], torch.zeros(2000, 48)], 1)
    # A quarter of the dimensions, each twice as wide.
    assert spread(flat).item() == pytest.approx(0.5, abs=0.01)
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    by_hand = (unit - unit.mean(0)).square().mean(0).sqrt().mean() * 8
    assert spread(x.double()).item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert 0.05 < spread(x + 10).item() < 0.2


def test_scale_and_rotation_do_not_matter() -> None:
    x = rows()
    expected = effective_rank(x)
    rotation, _ = torch.linalg.qr(rows(5, 5, 3))
    for other in (1e-8 * x, 1e8 * x, x @ rotation, x.T):
        torch.testing.assert_close(effective_rank(other), expected)
    assert 1 < expected < 5
    for other in (1e-6 * x, 1e6 * x, x.half()):
        torch.testing.assert_close(spread(other).double(), spread(x), rtol=0.01, atol=0)


@pytest.mark.parametrize("function", [effective_rank, spread])
def test_of_any_kind(function: Any) -> None:
    x = rows(30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = function(x.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half, function(x.bfloat16().float()))
    assert not function(x.requires_grad_()).requires_grad
    assert function(torch.empty(6, 4, device="meta")).shape == ()
    with pytest.raises(ValueError, match=r"x must be \(N, D\)"):
        function(torch.ones(2, 3, 4))
    for value in (math.nan, math.inf):
        assert function(torch.cat([x, torch.full((1, 5), value)])).isnan()
    assert spread(x[:1]).isnan()
