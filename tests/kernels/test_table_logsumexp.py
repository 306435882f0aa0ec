"""The fused log-sum-exp against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from solo_ext.kernels import table_logsumexp

N, K, D = 6, 23, 5


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(N, D, generator=generator, dtype=dtype)
    table = torch.randn(K, D, generator=generator, dtype=dtype)
    return query.requires_grad_(), table, 0.5 + 5 * torch.rand(K, generator=generator, dtype=dtype)


@pytest.mark.parametrize("tile", [None, 1, 7, 23, 100])
@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_the_plain_form(
    tile: int | None, scalar: bool, dtype: torch.dtype, tolerance: float
) -> None:
    query, table, scale = inputs(dtype)
    scale = scale[3] if scalar else scale
    found, largest = table_logsumexp(query, table, scale, tile)
    logits = query @ table.T * scale
    expected = logits.logsumexp(1)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(largest, logits.detach().amax(1), rtol=tolerance, atol=tolerance)
    assert not largest.requires_grad
    weights = torch.arange(1.0, N + 1, dtype=dtype)
    (one,) = torch.autograd.grad((found * weights).sum(), query)
    (two,) = torch.autograd.grad((expected * weights).sum(), query)
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scalar", [True, False])
def test_gradcheck(scalar: bool) -> None:
    query, table, scale = inputs()
    scale = scale[3] if scalar else scale
    assert torch.autograd.gradcheck(lambda q: table_logsumexp(q, table, scale, 7)[0], query)


def test_large_similarities_do_not_overflow() -> None:
    query, table, scale = inputs(torch.float32)
    lse, _ = table_logsumexp(query, table, 1e4 * scale, 4)
    lse.sum().backward()
    assert lse.isfinite().all()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_table_may_be_overwritten_before_the_backward_pass() -> None:
    query, table, scale = inputs()
    lse, _ = table_logsumexp(query, table, scale)
    (expected,) = torch.autograd.grad((query @ table.T * scale).logsumexp(1).sum(), query)
    table.zero_()
    (found,) = torch.autograd.grad(lse.sum(), query)
    torch.testing.assert_close(found, expected)


def test_empty_table() -> None:
    query, table, scale = inputs()
    lse, largest = table_logsumexp(query, table[:0], scale[:0])
    assert (lse == float("-inf")).all()
    assert (largest == float("-inf")).all()


def test_second_derivative_is_refused() -> None:
    query, table, scale = inputs()
    lse, _ = table_logsumexp(query, table, scale)
    (first,) = torch.autograd.grad(lse.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_gradient_where_none_is_wanted() -> None:
    query, table, scale = inputs()
    assert not table_logsumexp(query.detach(), table, scale)[0].requires_grad


def peak_bytes(rows: int) -> int:
    """Largest sum of what is allocated at a time, in a forward and backward pass."""
    query = torch.randn(64, 32, requires_grad=True)
    table, scale = torch.randn(rows, 32), torch.ones(())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        table_logsumexp(query, table, scale)[0].sum().backward()
    held = most = 0
    events: list = trace.profiler.kineto_results.events()  # type: ignore[type-arg, union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_memory_does_not_grow_with_the_table() -> None:
    small, large = peak_bytes(8192), peak_bytes(65536)
    assert small > 2**20, "the tile itself must be seen"
    assert large <= 1.1 * small
