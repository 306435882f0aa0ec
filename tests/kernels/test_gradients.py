"""What holds for the gradients of all kernels, which are computed in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels.in_batch import batch_contrast, two_view_contrast
from solo_ext.kernels.mixed_logsumexp import mixed_logsumexp
from solo_ext.kernels.prototype_contrast import prototype_contrast
from solo_ext.kernels.sinkhorn import assign
from solo_ext.kernels.tables import table_logsumexp
from solo_ext.losses.mochi import draw_mixes

N, K, D = 6, 23, 5
Kernel = Callable[[Tensor, Tensor], Tensor]
"""Scalar of (6, 5) queries and a (23, 5) table."""
Launches = Callable[[Callable[[], Any]], int]
Tiled = Callable[[int | None], None]


@pytest.fixture(autouse=True)
def several_tiles(tiled: Tiled) -> None:
    """All work is done in several tiles."""
    tiled(2)


def in_batch(query: Tensor, table: Tensor) -> Tensor:
    def reduce(lse: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        return F.softplus(lse[0] - positives[:, 0]), lse

    own = torch.arange(N).unsqueeze(1)
    positives = torch.zeros(N, 1, dtype=query.dtype)
    return batch_contrast(query, table, own, positives, 3.0, (1.0,), reduce)[0]


def mixed(query: Tensor, table: Tensor) -> Tensor:
    draws = draw_mixes(query, 4, 6, 3, torch.Generator().manual_seed(0))
    return mixed_logsumexp(query, table, 3.0, draws, 4, (1.7, 0.7)).lse.sum()


def prototypes(query: Tensor, table: Tensor) -> Tensor:
    scores = torch.linspace(0, 1, N * K, dtype=query.dtype).view(N, K)
    targets = assign(lambda rows, columns: scores[rows, columns] * 1, (N, K), scores, 3)
    one = torch.ones(1, 1, dtype=query.dtype)
    return prototype_contrast(query[None], table, [targets], one, None, 3.0)[0]


KERNELS: dict[str, Kernel] = {
    "two views": lambda q, t: two_view_contrast(q, t[:N], 2.0, 0.1, 0.5)[0],
    "in_batch": in_batch,
    "mixed": mixed,
    "prototypes": prototypes,
    "table": lambda q, t: table_logsumexp(q, t, 3.0, powers=(1.5, 0.5))[0].sum(),
    "bounded table": lambda q, t: table_logsumexp(q, t, 3.0, unit=True)[0].sum(),
}
EVERY = pytest.mark.parametrize("name", KERNELS)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, table = (
        F.normalize(torch.randn(n, D, generator=generator, dtype=torch.float64), dim=1)
        for n in (N, K)
    )
    return query.requires_grad_(), table


@EVERY
def test_follows_the_factor_of_the_loss(name: str) -> None:
    """Which a scaler of half precision makes large; the backward pass may be repeated."""
    query, table = inputs()
    loss = KERNELS[name](query, table)
    first, second = (
        torch.autograd.grad(loss * factor, query, retain_graph=True)[0] for factor in (1, 2**16)
    )
    assert first.any()
    assert torch.equal(2**16 * first, second)


@EVERY
def test_table_may_be_overwritten_before_the_backward_pass(name: str) -> None:
    query, table = inputs()
    (expected,) = torch.autograd.grad(KERNELS[name](query, table), query)
    loss = KERNELS[name](query, table)
    table.zero_()
    assert torch.equal(torch.autograd.grad(loss, query)[0], expected)


@EVERY
def test_second_derivative_is_refused(name: str) -> None:
    query, table = inputs()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(KERNELS[name](query, table), query, create_graph=True)


@EVERY
def test_no_gradient_where_none_is_wanted(name: str, launches: Launches) -> None:
    query, table = inputs()
    full, loss = launches(lambda: KERNELS[name](query, table)), KERNELS[name](query, table)
    with torch.no_grad():
        silent = KERNELS[name](query, table)
        assert launches(lambda: KERNELS[name](query, table)) < full
    constant = KERNELS[name](query.detach(), table)
    assert not silent.requires_grad
    assert not constant.requires_grad
    torch.testing.assert_close(silent, loss.detach())
    assert torch.equal(constant, silent)
