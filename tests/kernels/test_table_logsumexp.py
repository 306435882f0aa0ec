"""The fused log-sum-exp against the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import table_logsumexp

N, K, D = 6, 23, 5
POWERS = [None, (1.0,), (0.4,), (1.7, 0.7), (2.0, 1.0, 0.3)]
PeakBytes = Callable[[Callable[[], Any]], int]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(N, D, generator=generator, dtype=dtype)
    table = torch.randn(K, D, generator=generator, dtype=dtype)
    return query.requires_grad_(), table, 0.5 + 5 * torch.rand(K, generator=generator, dtype=dtype)


def weights_of(table: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(table), generator=generator, dtype=table.dtype)


def plain(
    query: Tensor,
    table: Tensor,
    scale: Tensor,
    log_weight: Tensor | None = None,
    powers: tuple[float, ...] | None = None,
) -> Tensor:
    logits = query @ table.T * scale
    extra = torch.zeros(()) if log_weight is None else log_weight
    lse = [(p * logits + extra).logsumexp(1) for p in powers or (1.0,)]
    return lse[0] if powers is None else torch.stack(lse)


def slopes(lse: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a sum in which every log-sum-exp has a weight of its own."""
    each = torch.arange(1.0, lse.numel() + 1, dtype=lse.dtype).view_as(lse)
    return torch.autograd.grad((lse * each).sum(), wanted)


@pytest.mark.parametrize("tile", [None, 1, 7, 23, 100])
@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("powers", POWERS)
@pytest.mark.parametrize("learns", [False, True])
def test_equals_the_plain_form(
    tile: int | None,
    scalar: bool,
    weighted: bool,
    powers: tuple[float, ...] | None,
    learns: bool,
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        query, table, scale = inputs(dtype)
        table.requires_grad_(learns)
        scale = scale[3] if scalar else scale
        log_weight = weights_of(table) if weighted else None
        found, largest = table_logsumexp(
            query, table, scale, tile, log_weight=log_weight, powers=powers
        )
        expected = plain(query, table, scale, log_weight, powers)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        most = (query @ table.T * scale).detach().amax(1)
        torch.testing.assert_close(largest, most, rtol=tolerance, atol=tolerance)
        assert not largest.requires_grad
        wanted = (query, table) if learns else (query,)
        for one, two in zip(slopes(found, *wanted), slopes(expected, *wanted), strict=True):
            torch.testing.assert_close(one, two, rtol=10 * tolerance, atol=10 * tolerance)


def test_only_the_table_learns() -> None:
    query, table, scale = inputs()
    query, table = query.detach(), table.requires_grad_()
    (found,) = slopes(table_logsumexp(query, table, scale, 7)[0], table)
    (expected,) = slopes(plain(query, table, scale), table)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scalar", [True, False])
def test_gradcheck(scalar: bool) -> None:
    query, table, scale = inputs()
    scale, log_weight = scale[3] if scalar else scale, weights_of(table)

    def fused(q: Tensor, t: Tensor) -> Tensor:
        return table_logsumexp(q, t, scale, 7, log_weight=log_weight, powers=(1.5, 0.5))[0]

    assert torch.autograd.gradcheck(lambda q: table_logsumexp(q, table, scale, 7)[0], query)
    assert torch.autograd.gradcheck(fused, (query, table.requires_grad_()))


def test_large_similarities_do_not_overflow() -> None:
    query, table, scale = inputs(torch.float32)
    table.requires_grad_()
    lse, _ = table_logsumexp(query, table, 1e4 * scale, 4, powers=(3.0, 2.0))
    assert lse.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in slopes(lse, query, table))


@pytest.mark.parametrize("tile", [None, 1, 7, 100])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_columns_are_rows_of_the_table(
    tile: int | None, learns: bool, scalar: bool, weighted: bool
) -> None:
    """Some of them in any order, one again and again; scale and weight are the column's."""
    query, table, scale = inputs()
    table.requires_grad_(learns)
    columns = torch.tensor([20, 3, 3, 0, 22, 3, 8, 1, 20])
    scale = scale[3] if scalar else scale[: len(columns)]
    log_weight = weights_of(columns.double()) if weighted else None
    settings: dict[str, Any] = {"log_weight": log_weight, "powers": (1.7, 0.7)}
    found, largest = table_logsumexp(query, table, scale, tile, columns=columns, **settings)
    expected, most = table_logsumexp(query, table[columns], scale, tile, **settings)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(largest, most)
    wanted = (query, table) if learns else (query,)
    for one, two in zip(slopes(found, *wanted), slopes(expected, *wanted), strict=True):
        torch.testing.assert_close(one, two)


def test_no_columns() -> None:
    query, table, scale = inputs()
    nothing = torch.empty(0, dtype=torch.long)
    lse, _ = table_logsumexp(query, table, scale[:0], columns=nothing)
    assert (lse == float("-inf")).all()


def test_memory_does_not_grow_with_the_columns(peak_bytes: PeakBytes) -> None:
    """Of a table that is not copied either."""
    query, table = torch.randn(64, 32, requires_grad=True), torch.randn(65536, 32)

    def peak(count: int) -> int:
        columns, scale = torch.randperm(65536)[:count], torch.ones(count)
        return peak_bytes(
            lambda: table_logsumexp(query, table, scale, columns=columns)[0].sum().backward()
        )

    small, large = peak(8192), peak(65536)
    assert small > 2**20, "the tile itself must be seen"
    assert large <= 1.05 * small


@pytest.mark.parametrize("tile", [1, 4, 100])
@pytest.mark.parametrize("learns", [False, True])
def test_rows_without_weight_are_left_out(tile: int, learns: bool) -> None:
    """Also where they fill the first tile, or all of them."""
    query, table, scale = inputs()
    table.requires_grad_(learns)
    kept = torch.arange(K) % 7 > 4
    log_weight = torch.where(kept, 0.0, float("-inf")).double()
    found, _ = table_logsumexp(query, table, scale, tile, log_weight=log_weight)
    expected = plain(query, table[kept], scale[kept])
    torch.testing.assert_close(found, expected)
    wanted = (query, table) if learns else (query,)
    for one, two in zip(slopes(found, *wanted), slopes(expected, *wanted), strict=True):
        torch.testing.assert_close(one, two)
    nothing = torch.full_like(log_weight, float("-inf"))
    lse, _ = table_logsumexp(query, table, scale, tile, log_weight=nothing)
    assert (lse == float("-inf")).all()
    assert not any(gradient.any() for gradient in slopes(lse, *wanted))


def test_table_may_be_overwritten_before_the_backward_pass() -> None:
    query, table, scale = inputs()
    lse, _ = table_logsumexp(query, table, scale)
    (expected,) = torch.autograd.grad(plain(query, table, scale).sum(), query)
    table.zero_()
    (found,) = torch.autograd.grad(lse.sum(), query)
    torch.testing.assert_close(found, expected)


def test_table_that_learns_may_not() -> None:
    query, table, scale = inputs()
    lse, _ = table_logsumexp(query, table.requires_grad_(), scale)
    with torch.no_grad():
        table.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lse.sum().backward()


@pytest.mark.parametrize("powers", [None, (2.0, 1.0)])
def test_empty_table(powers: tuple[float, ...] | None) -> None:
    query, table, scale = inputs()
    lse, largest = table_logsumexp(query, table[:0], scale[:0], powers=powers)
    assert (lse == float("-inf")).all()
    assert (largest == float("-inf")).all()
    assert not slopes(lse, query)[0].any()


@pytest.mark.parametrize("learns", [False, True])
def test_second_derivative_is_refused(learns: bool) -> None:
    query, table, scale = inputs()
    lse, _ = table_logsumexp(query, table.requires_grad_(learns), scale)
    (first,) = torch.autograd.grad(lse.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_gradient_where_none_is_wanted() -> None:
    query, table, scale = inputs()
    assert not table_logsumexp(query.detach(), table, scale)[0].requires_grad
    with torch.no_grad():
        assert not table_logsumexp(query, table.requires_grad_(), scale)[0].requires_grad


@pytest.mark.parametrize("powers", [None, (1.7, 0.7)])
@pytest.mark.parametrize("learns", [False, True])
def test_factors_of_half_precision(powers: tuple[float, ...] | None, learns: bool) -> None:
    query, table, _ = inputs(torch.float32)
    query = F.normalize(query.detach(), dim=1).requires_grad_()
    table = F.normalize(table, dim=1).requires_grad_(learns)
    scale = torch.tensor(5.0)
    exact, half = (
        table_logsumexp(query, table, scale, 7, powers=powers, compute_dtype=dtype)[0]
        for dtype in (None, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=2e-2, atol=2e-2)
    wanted = (query, table) if learns else (query,)
    for one, two in zip(slopes(half, *wanted), slopes(exact, *wanted), strict=True):
        assert one.dtype == torch.float32
        assert (one - two).norm() < 2e-2 * two.norm()


def test_memory_does_not_grow_with_the_table(peak_bytes: PeakBytes) -> None:
    def peak(rows: int) -> int:
        query = torch.randn(64, 32, requires_grad=True)
        table, scale = torch.randn(rows, 32), torch.ones(())
        return peak_bytes(lambda: table_logsumexp(query, table, scale)[0].sum().backward())

    small, large = peak(8192), peak(65536)
    assert small > 2**20, "the tile itself must be seen"
    assert large <= 1.1 * small


def test_memory_of_a_table_that_learns_is_its_gradient_s(peak_bytes: PeakBytes) -> None:
    """And not that of the similarities, of which there are sixteen times as many."""
    query, table = torch.randn(256, 16), torch.randn(65536, 16, requires_grad=True)
    scale, gradient = torch.ones(()), 4 * table.numel()
    peak = peak_bytes(lambda: table_logsumexp(query, table, scale)[0].sum().backward())
    assert gradient < peak < 3 * gradient


def test_without_gradient_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for inputs that would want one."""
    query, table, scale = inputs()
    with torch.no_grad():
        assert not table_logsumexp(query, table, scale)[0].requires_grad
    seen: list[bool] = []
    original = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda *a, **k: seen.append(True) or original(*a))
    with torch.no_grad():
        table_logsumexp(query, table, scale)
    assert not seen
    table_logsumexp(query, table, scale)
    assert seen
