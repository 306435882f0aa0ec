"""Log-sum-exps and means over a large table against the plain forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels.tables import BOUND, table_logsumexp, table_mean
from tests.kernels.conftest import Launches, Tiled, normal, slope, unit

N, K, D = 6, 23, 5
POWERS = pytest.mark.parametrize("powers", [(1.0,), (0.4,), (1.7, 0.7), (2.0, 1.0, 0.3)])
BOUNDED = pytest.mark.parametrize("bounded", [False, True])
TILES = pytest.mark.parametrize("tile", [None, 1, 7, 100])


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return unit(N, D, dtype=dtype).requires_grad_(), unit(K, D, seed=1, dtype=dtype)


def plain(
    query: Tensor,
    table: Tensor,
    scale: float,
    log_weight: Tensor | None = None,
    powers: tuple[float, ...] = (1.0,),
) -> Tensor:
    logits = query @ table.T * scale
    extra = torch.zeros(()) if log_weight is None else log_weight
    return torch.stack([(p * logits + extra).logsumexp(1) for p in powers])


@TILES
@POWERS
@BOUNDED
def test_rows_with_one_of_the_query_s_ids_are_left_out(
    tiled: Tiled, tile: int | None, powers: tuple[float, ...], bounded: bool
) -> None:
    """As if they had no weight, and query by query."""
    tiled(tile)
    query, table = inputs()
    ids, settings = torch.arange(K) % 9, {"powers": powers, "unit": bounded}
    one = torch.arange(N)
    for own in (one, torch.stack((one, (one + 2) % 9, one), 1)):
        found, _ = table_logsumexp(query, table, 4.5, query_ids=own, table_ids=ids, **settings)
        left = [~torch.isin(ids, own[i]) for i in range(N)]
        rows = [plain(query[i : i + 1], table[left[i]], 4.5, powers=powers) for i in range(N)]
        expected = torch.cat(rows, 1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        slopes = slope(found, query), slope(expected, query)
        torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


@TILES
@pytest.mark.parametrize("weighted", [False, True])
@POWERS
@BOUNDED
def test_equals_the_plain_form(
    tiled: Tiled, tile: int | None, weighted: bool, powers: tuple[float, ...], bounded: bool
) -> None:
    """Over rows of the table in any order, one again and again, and over all of it."""
    tiled(tile)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        for columns in (None, torch.tensor([20, 3, 3, 0, 22, 3, 8, 1, 20])):
            query, table = inputs(dtype)
            rows = table if columns is None else table[columns]
            log_weight = normal(len(rows), dtype=dtype) if weighted else None
            settings: Any = {"powers": powers, "log_weight": log_weight, "unit": bounded}
            found, largest = table_logsumexp(query, table, 4.5, columns=columns, **settings)
            expected = plain(query, rows, 4.5, log_weight, powers)
            assert found.dtype == dtype
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            most = (query @ rows.T * 4.5).detach().amax(1)
            if not bounded:
                torch.testing.assert_close(largest, most, rtol=tolerance, atol=tolerance)
            assert not largest.requires_grad
            ours, theirs = slope(found, query), slope(expected, query)
            torch.testing.assert_close(ours, theirs, rtol=20 * tolerance, atol=20 * tolerance)


@pytest.mark.parametrize("size", [0, K])
def test_mean_equals_the_plain_form(size: int) -> None:
    query, table = inputs()
    for scale in (1.0, 50.0, 1e4):
        lse, mean = table_mean(query, table[:size], scale)
        logits = scale * query.detach() @ table[:size].T
        torch.testing.assert_close(lse, logits.logsumexp(1))
        torch.testing.assert_close(mean, logits.softmax(1) @ table[:size])
        assert not mean.requires_grad


def test_large_similarities_do_not_overflow(tiled: Tiled) -> None:
    tiled(4)
    query, table = inputs(torch.float32)
    lse, _ = table_logsumexp(query, table, 1e4, powers=(3.0, 2.0))
    assert lse.isfinite().all()
    assert slope(lse, query).isfinite().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_single_precision_at_the_bound(sign: float) -> None:
    """All similarities as large, or as low, as they can be."""
    query = F.normalize(torch.ones(N, D), dim=1).requires_grad_()
    table = sign * query.detach()[:1].repeat(2000, 1)
    lse, _ = table_logsumexp(query, table, BOUND, unit=True)
    expected = torch.tensor(2000.0).log() + sign * BOUND
    torch.testing.assert_close(lse, expected.expand(1, N), rtol=1e-5, atol=0)
    torch.testing.assert_close(slope(lse, query)[0], BOUND * table[0], rtol=1e-4, atol=0)


def test_running_maximum_where_the_bound_is_too_large() -> None:
    query, table = inputs()
    for scale, powers, spared in ((40.0, (1.0,), True), (40.1, (1.0,), False), (21, (2.0,), False)):
        _, largest = table_logsumexp(query, table, scale, powers=powers, unit=True)
        assert largest.isnan().all() == spared


@pytest.mark.parametrize("tile", [1, 4, 100])
def test_rows_without_weight_are_left_out(tiled: Tiled, tile: int) -> None:
    """Also where they fill the first tile, or all of them."""
    tiled(tile)
    query, table = inputs()
    kept = torch.arange(K) % 7 > 4
    log_weight = torch.where(kept, 0.0, float("-inf")).double()
    found, _ = table_logsumexp(query, table, 4.5, log_weight=log_weight)
    expected = plain(query, table[kept], 4.5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slope(found, query), slope(expected, query))
    nothing = torch.full_like(log_weight, float("-inf"))
    lse, _ = table_logsumexp(query, table, 4.5, log_weight=nothing)
    assert (lse == float("-inf")).all()
    assert not slope(lse, query).any()


@BOUNDED
def test_no_rows(bounded: bool) -> None:
    query, table = inputs()
    nothing = torch.empty(0, dtype=torch.long)
    for rows, columns in ((table[:0], None), (table, nothing)):
        lse, _ = table_logsumexp(query, rows, 4.5, columns=columns, powers=(2.0, 1.0), unit=bounded)
        assert (lse == float("-inf")).all()
        assert not slope(lse, query).any()


@POWERS
@BOUNDED
def test_factors_of_half_precision(tiled: Tiled, powers: tuple[float, ...], bounded: bool) -> None:
    tiled(7)
    query, table = inputs(torch.float32)
    exact, half = (
        table_logsumexp(query, table, 5.0, powers=powers, unit=bounded, compute_dtype=d)[0]
        for d in (None, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=2e-2, atol=2e-2)
    one, two = slope(half, query), slope(exact, query)
    assert one.dtype == torch.float32
    assert (one - two).norm() < 2e-2 * two.norm()


def test_fewer_launches_without_a_running_maximum(launches: Launches, tiled: Tiled) -> None:
    """Product, exponential, sum twice and the mean, of every tile."""
    query, _ = inputs(torch.float32)
    table = F.normalize(torch.randn(700, D), dim=1)

    def of(tile: int, bounded: bool = True, dtype: torch.dtype | None = None) -> int:
        tiled(tile)
        return launches(
            lambda: table_logsumexp(query, table, 5.0, unit=bounded, compute_dtype=dtype)
        )

    assert of(7) - of(70) == 5 * 90
    assert of(7, dtype=torch.bfloat16) - of(70, dtype=torch.bfloat16) == 9 * 90
    assert of(7) < of(7, bounded=False) / 2
