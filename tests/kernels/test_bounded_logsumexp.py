"""The log-sum-exp of bounded similarities against the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import bounded_logsumexp, table_logsumexp
from solo_ext.kernels.bounded_logsumexp import BOUND
from solo_ext.losses.contrastive import NegativeEstimator, contrastive

N, K, D = 6, 23, 5
POWERS = [(1.0,), (0.4,), (1.7, 0.7), (2.0, 1.0, 0.3)]
PeakBytes = Callable[[Callable[[], Any]], int]
Launches = Callable[[Callable[[], Any]], int]


def inputs(dtype: torch.dtype = torch.float64, rows: int = K) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, rows)]
    query, table = (F.normalize(x, dim=1).to(dtype) for x in made)
    return query.requires_grad_(), table


def slopes(lse: Tensor, query: Tensor) -> Tensor:
    """Gradient of a sum in which every log-sum-exp has a weight of its own."""
    each = torch.arange(1.0, lse.numel() + 1, dtype=lse.dtype).view_as(lse)
    return torch.autograd.grad((lse * each).sum(), query)[0]


@pytest.mark.parametrize("tile", [None, 1, 7, 23, 100])
@pytest.mark.parametrize("powers", POWERS)
@pytest.mark.parametrize("inverse_temperature", [0.5, 5.0, 20.0])
def test_equals_the_plain_form(
    tile: int | None, powers: tuple[float, ...], inverse_temperature: float
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        query, table = inputs(dtype)
        found = bounded_logsumexp(query, table, inverse_temperature, powers, tile)
        logits = query @ table.T * inverse_temperature
        expected = torch.stack([(p * logits).logsumexp(1) for p in powers])
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        ours, theirs = slopes(found, query), slopes(expected, query)
        torch.testing.assert_close(ours, theirs, rtol=20 * tolerance, atol=20 * tolerance)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_single_precision_at_the_bound(sign: float) -> None:
    """All similarities as large, or as low, as they can be."""
    query = F.normalize(torch.ones(N, D), dim=1).requires_grad_()
    table = sign * query.detach()[:1].repeat(2000, 1)
    lse = bounded_logsumexp(query, table, BOUND)
    expected = torch.tensor(2000.0).log() + sign * BOUND
    torch.testing.assert_close(lse, expected.expand(1, N), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(lse.sum(), query)[0], BOUND * table[:N], rtol=1e-4, atol=0
    )


def test_gradcheck() -> None:
    query, table = inputs()
    assert torch.autograd.gradcheck(
        lambda q: bounded_logsumexp(q, table, 4.0, (1.5, 0.5), 7), query
    )


@pytest.mark.parametrize("powers", POWERS)
def test_factors_of_half_precision(powers: tuple[float, ...]) -> None:
    query, table = inputs(torch.float32)
    exact, half = (
        bounded_logsumexp(query, table, 5.0, powers, 7, compute_dtype=dtype)
        for dtype in (None, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=2e-2, atol=2e-2)
    one, two = slopes(half, query), slopes(exact, query)
    assert one.dtype == torch.float32
    assert (one - two).norm() < 2e-2 * two.norm()


def test_fewer_launches_than_with_a_running_maximum(launches: Launches) -> None:
    """Product, exponential, sum twice and the mean, of every tile."""
    query, table = inputs(torch.float32, 700)

    def of(tile: int, dtype: torch.dtype | None = None) -> int:
        return launches(
            lambda: bounded_logsumexp(query, table, 5.0, tile=tile, compute_dtype=dtype)
        )

    running = launches(lambda: table_logsumexp(query, table, query.new_full((), 5.0), 7))
    assert of(7) - of(70) == 5 * 90
    assert of(7, torch.bfloat16) - of(70, torch.bfloat16) == 9 * 90
    assert of(7) < running / 2


def test_memory_does_not_grow_with_the_table(peak_bytes: PeakBytes) -> None:
    def peak(rows: int) -> int:
        query = F.normalize(torch.randn(64, 32), dim=1).requires_grad_()
        table = F.normalize(torch.randn(rows, 32), dim=1)
        return peak_bytes(lambda: bounded_logsumexp(query, table, 5.0).sum().backward())

    small, large = peak(8192), peak(65536)
    assert 2**20 < small < 1.1 * 2**20, "one tile and little else"
    assert large <= 1.1 * small


def test_table_may_be_overwritten_before_the_backward_pass() -> None:
    query, table = inputs()
    lse = bounded_logsumexp(query, table, 5.0)
    expected = torch.autograd.grad((query @ table.T * 5).logsumexp(1).sum(), query)[0]
    table.zero_()
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), query)[0], expected)


def test_second_derivative_is_refused() -> None:
    query, table = inputs()
    lse = bounded_logsumexp(query, table, 5.0)
    (first,) = torch.autograd.grad(lse.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_gradient_where_none_is_wanted(launches: Launches) -> None:
    query, table = inputs()
    full = launches(lambda: bounded_logsumexp(query, table, 5.0, tile=1))
    assert not bounded_logsumexp(query.detach(), table, 5.0).requires_grad
    with torch.no_grad():
        assert not bounded_logsumexp(query, table, 5.0).requires_grad
        # The product with the rows of every tile.
        assert launches(lambda: bounded_logsumexp(query, table, 5.0, tile=1)) <= full - K


@pytest.mark.parametrize(
    ("temperature", "beta", "bounded"),
    [(0.2, 0.0, True), (1 / 39, 0.0, True), (1 / 41, 0.0, False), (0.1, 2.9, True)],
)
def test_losses_take_it_where_the_bound_allows(
    monkeypatch: pytest.MonkeyPatch, temperature: float, beta: float, bounded: bool
) -> None:
    """And agree on either side."""
    seen: list[str] = []

    def noting(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            seen.append(kernel.__name__)
            return kernel(*args, **settings)

        return call

    for kernel in (bounded_logsumexp, table_logsumexp):
        monkeypatch.setattr(f"solo_ext.losses.core.{kernel.__name__}", noting(kernel))

    def found(**settings: Any) -> tuple[Tensor, Tensor]:
        query, table = inputs()
        terms = contrastive(
            query,
            table[:N].unsqueeze(1),
            table,
            estimator=NegativeEstimator(0.01, beta),
            temperature=temperature,
        )
        return terms.loss, torch.autograd.grad(terms.loss, query)[0]

    first = found()
    assert seen == ["bounded_logsumexp" if bounded else "table_logsumexp"]
    monkeypatch.setattr("solo_ext.losses.core.BOUND", 0.0 if bounded else 100.0)
    for one, two in zip(first, found(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-14)
    assert len(set(seen)) == 2
