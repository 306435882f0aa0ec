"""The effective rank against its definition and where it is known."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.losses.alignment import effective_rank, spread


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


def test_equal_directions_count_one_each() -> None:
    assert effective_rank(torch.eye(7)).item() == pytest.approx(7, rel=1e-5)
    assert effective_rank(torch.eye(7)[:3]).item() == pytest.approx(3, rel=1e-5)


def test_neither_scale_nor_rotation_nor_order_matters() -> None:
    x = rows()
    expected = effective_rank(x)
    rotation, _ = torch.linalg.qr(rows(5, 5, 3))
    for other in (1e-8 * x, 1e8 * x, x @ rotation, x.flip(0), x.T):
        torch.testing.assert_close(effective_rank(other), expected)
    assert 1 < expected < 5
    assert effective_rank(1e-30 * x.float()).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_mean_is_a_direction() -> None:
    x = rows(200)
    assert effective_rank(x + 1000) < 1.1 < 4.5 < effective_rank(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "dim"), [(1, 5), (4, 3), (64, 32), (3, 40)])
def test_collapsed_and_zero_rows_have_rank_one(count: int, dim: int, dtype: torch.dtype) -> None:
    collapsed = F.normalize(rows(1, dim), dim=1).expand(count, dim).to(dtype)
    assert effective_rank(collapsed).item() == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.zeros(count, dim, dtype=dtype)).item() == 1
    assert effective_rank(1e-30 * collapsed).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_gives_nan(value: float) -> None:
    x = rows()
    x[2, 3] = value
    assert effective_rank(x).isnan()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_computes_in_single_precision(half: torch.dtype) -> None:
    x = rows(64, 32).to(half)
    with torch.autocast("cpu", dtype=half):
        found = effective_rank(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, effective_rank(x.float()))
    assert torch.equal(found, effective_rank(x))
    exact = effective_rank(x.double())
    assert exact.dtype == torch.float64
    assert found.item() == pytest.approx(exact.item(), rel=1e-5)


def test_no_gradient_no_rows_and_no_values() -> None:
    assert not effective_rank(rows().requires_grad_()).requires_grad
    assert effective_rank(torch.zeros(0, 4)).item() == 1
    assert effective_rank(torch.empty(6, 4, device="meta")).shape == ()


def test_refuses_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(N, D\), got \(2, 3, 4\)"):
        effective_rank(torch.ones(2, 3, 4))


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


def test_spread_of_any_scale_and_kind() -> None:
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    for other in (1e-6 * x, 1e6 * x, x.bfloat16().float()):
        torch.testing.assert_close(spread(other), spread(x), rtol=0.01, atol=0)
    assert spread(x.half()).dtype == torch.float32
    assert spread(torch.cat([x, torch.full((1, 8), float("nan"))])).isnan()
    assert spread(x[:1]).isnan()
    assert spread(torch.empty(6, 4, device="meta")).shape == ()
    assert not spread(x.requires_grad_()).requires_grad
    with pytest.raises(ValueError, match=r"x must be \(N, D\)"):
        spread(torch.ones(4))
