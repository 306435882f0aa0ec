"""The fused log-sum-exp over mixtures against mixtures that are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_bytes
from solo_ext.kernels.mixed_logsumexp import MixDraws, MixedLogSumExp, mixed_logsumexp
from solo_ext.losses.mochi import draw_mixes
from tests.kernels.conftest import Tiled, slope, unit

N, K, D, HARD = 5, 11, 4, 4


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, MixDraws]:
    query, table = unit(N, D, dtype=dtype), unit(K, D, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    own = torch.stack([torch.randperm(K, generator=generator)[:2] for _ in range(N)])
    return query.requires_grad_(), table, own, draw_mixes(query, HARD, 6, 3, generator)


def plain(
    query: Tensor,
    table: Tensor,
    factor: float,
    draws: MixDraws,
    num_hard: int,
    powers: tuple[float, ...] = (1.0,),
    *,
    excluded_columns: Tensor | None = None,
    with_table: bool = True,
) -> MixedLogSumExp:
    """Every mixture of every query as a row."""
    cosine = query @ table.T
    if excluded_columns is not None:
        cosine = cosine.scatter(1, excluded_columns, float("-inf"))
    with torch.no_grad():
        values, top = cosine.topk(num_hard, dim=1)
        hard = table[top]

        def chosen(indices: Tensor) -> Tensor:
            return hard.gather(1, indices.unsqueeze(2).expand(-1, -1, table.shape[1]))

        first, second = (chosen(indices) for indices in draws.pair_indices.unbind(2))
        alpha, beta = draws.alpha.unsqueeze(2), draws.beta.unsqueeze(2)
        pairs = alpha * first + (1 - alpha) * second
        singles = beta * query.unsqueeze(1) + (1 - beta) * chosen(draws.single_indices)
        made = F.normalize(torch.cat((pairs, singles), 1), dim=2)
    mixed = torch.einsum("nd,nsd->ns", query, made)
    every = torch.cat((cosine, mixed), 1) if with_table else mixed
    lse = torch.stack([(p * factor * every).logsumexp(1) for p in powers])
    return MixedLogSumExp(lse, values.mean(1), mixed.detach().mean(1))


def check(found: MixedLogSumExp, expected: MixedLogSumExp, query: Tensor) -> None:
    """Compares values and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    ours, theirs = slope(found.lse, query), slope(expected.lse, query)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("tile", [1, 2, 5, 100, None])
@pytest.mark.parametrize("powers", [(1.0,), (0.4,), (1.7, 0.7), (3.0, 1.0, 0.5)])
@pytest.mark.parametrize("factor", [2.0, 100.0])
@pytest.mark.parametrize("excludes", [False, True])
@pytest.mark.parametrize("with_table", [False, True])
def test_equals_the_plain_form(
    tiled: Tiled,
    tile: int | None,
    powers: tuple[float, ...],
    factor: float,
    excludes: bool,
    with_table: bool,
) -> None:
    tiled(tile)
    query, table, own, draws = inputs()
    settings: Any = {"excluded_columns": own if excludes else None, "with_table": with_table}
    found = mixed_logsumexp(query, table, factor, draws, HARD, powers, **settings)
    expected = plain(query, table, factor, draws, HARD, powers, **settings)
    check(found, expected, query)
    assert found.lse.shape == (len(powers), N)
    assert not found.hardest.requires_grad
    assert not found.mixed.requires_grad


@pytest.mark.parametrize("tile", [2, None])
def test_rows_with_the_query_s_id_are_left_out(tiled: Tiled, tile: int | None) -> None:
    tiled(tile)
    query, table, _, draws = inputs()
    own, table = torch.arange(N), table[: 2 * N]
    columns, powers = torch.stack([own, own + N], 1), (1.7, 0.7)
    ids: Any = {"query_ids": own, "table_ids": own.repeat(2)}
    found = mixed_logsumexp(query, table, 5.0, draws, HARD, powers, **ids)
    expected = plain(query, table, 5.0, draws, HARD, powers, excluded_columns=columns)
    check(found, expected, query)


def test_large_similarities_do_not_overflow() -> None:
    query, table, _, draws = inputs(torch.float32)
    found = mixed_logsumexp(query, table, 1e4, draws, HARD, (3.0, 2.0))
    assert found.lse.isfinite().all()
    assert slope(found.lse, query).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opposite_rows_mixed_half_and_half(dtype: torch.dtype) -> None:
    """Their mixture has no direction: finite, and similar to nothing."""
    row = F.normalize(torch.ones(1, D, dtype=dtype), dim=1)
    query = row.clone().requires_grad_()
    half = torch.full((1, 1), 0.5, dtype=dtype)
    pair = torch.tensor([[[0, 1]]])
    draws = MixDraws(pair, half, pair[:, :0, 0], half[:, :0])
    found = mixed_logsumexp(query, torch.cat((row, -row)), 5.0, draws, 2, with_table=False)
    torch.testing.assert_close(found.lse, torch.zeros_like(found.lse), rtol=0, atol=1e-2)
    assert slope(found.lse, query).isfinite().all()


def test_single_precision_keeps_up() -> None:
    query, table, own, draws = inputs()
    single = query.detach().float().requires_grad_()
    # Draws of fp64 serve, too.
    settings = 10.0, draws, HARD, (1.7, 0.7)
    exact = mixed_logsumexp(query, table, *settings, excluded_columns=own)
    found = mixed_logsumexp(single, table.float(), *settings, excluded_columns=own)
    assert found.lse.dtype == found.mixed.dtype == torch.float32
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)
    ours, theirs = slope(found.lse, single).double(), slope(exact.lse, query)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_memory_is_a_twenty_fifth_of_the_plain_form_s() -> None:
    query = F.normalize(torch.randn(128, 128), dim=1).requires_grad_()
    table = F.normalize(torch.randn(16384, 128), dim=1)
    draws = draw_mixes(query, 1024, 1024, 128)

    def of(form: Callable[..., MixedLogSumExp]) -> int:
        return peak_bytes(lambda: form(query, table, 5.0, draws, 1024).lse.sum().backward())

    assert of(mixed_logsumexp) * 25 <= of(plain)
