"""What the operations on large tables, and their losses, hold at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.measure import peak_bytes
from solo_ext.kernels.nearest_rows import nearest_rows
from solo_ext.kernels.tables import table_logsumexp
from solo_ext.losses import proto_nce_loss_func, protocpc_step, seed_loss_func
from tests.kernels import conftest

N, D = 256, 8
Work = Callable[[], Any]


def unit(*shape: int, seed: int = 0) -> Tensor:
    return conftest.unit(*shape, seed=seed, dtype=torch.float32)


def of_table(rows: int, bounded: bool) -> Work:
    query, table = unit(N, D).requires_grad_(), unit(rows, D, seed=1)
    return lambda: table_logsumexp(query, table, 5.0, unit=bounded)[0].sum().backward()


def of_nearest(rows: int, k: int) -> Work:
    query, table = unit(N, D), unit(rows, D, seed=1)
    ids = {"query_ids": torch.arange(N), "table_ids": torch.arange(rows)}
    return lambda: nearest_rows(query, table, k, **ids)


def of_seed(rows: int) -> Work:
    student, teacher, queue = unit(N, D).requires_grad_(), unit(N, D, seed=1), unit(rows, D, seed=2)
    return lambda: torch.autograd.grad(seed_loss_func(student, teacher, queue), student)


@pytest.mark.parametrize(
    ("work", "growth"),
    [
        pytest.param(partial(of_table, bounded=False), 1.05, id="table"),
        pytest.param(partial(of_table, bounded=True), 1.05, id="bounded table"),
        pytest.param(partial(of_nearest, k=1), 1.1, id="nearest row"),
        pytest.param(partial(of_nearest, k=3), 1.1, id="nearest rows"),
        pytest.param(of_seed, 1.1, id="seed"),
    ],
)
def test_memory_does_not_grow_with_the_table(
    work: Callable[[int], Work], growth: float, request: Any
) -> None:
    small, large = peak_bytes(work(8192)), peak_bytes(work(65536))
    assert small > 2**20, "the tile itself must be seen"
    assert large <= growth * small
    assert large < 4 * N * 65536 / 4
    if request.node.callspec.id == "bounded table":
        assert small < 1.1 * 2**20, "one tile and little else"


@pytest.mark.parametrize(("dtype", "share"), [(None, 1.0), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("learns", [False, True])
def test_a_step_of_protocpc_holds_the_teachers_exponentials_alone(
    learns: bool, dtype: torch.dtype | None, share: float
) -> None:
    """And a gradient; the samples' blocks are a constant."""
    size = 2**17
    student, prototypes = unit(N, D).requires_grad_(), unit(size, D).requires_grad_(learns)
    views, prior = (student.unsqueeze(0), unit(1, N, D, seed=1)), torch.ones(size)
    wanted = (student, prototypes) if learns else (student,)
    peak = peak_bytes(
        lambda: torch.autograd.grad(
            protocpc_step(*views, prototypes, prior, compute_dtype=dtype).loss, wanted
        )
    )
    matrix = 4 * N * size
    rows = 4 * size * (D * (learns + 1) + 16)
    assert share * matrix < peak < share * matrix + rows + 1.3 * 2**25


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("collisions", ["paper", "merge"])
def test_proto_nce_does_not_grow_with_what_is_drawn(
    dtype: torch.dtype | None, collisions: Any
) -> None:
    """But by the drawn ids and their concentrations, a few numbers for each."""
    count, dim, size = 64, 128, 2**15
    query, prototypes = unit(count, dim).requires_grad_(), unit(size, dim, seed=1)
    phi, positives = torch.linspace(0.1, 0.3, size), torch.arange(count)
    lots = torch.randperm(size - count) + count

    def peak(drawn: int) -> int:
        given = prototypes, phi, positives, lots[:drawn], collisions, dtype
        return peak_bytes(lambda: proto_nce_loss_func(query, *given).backward())

    small, large = peak(2**12), peak(size - count)
    assert small > 2**20, "the tile itself must be seen"
    # A quarter of a copy of their rows would be more.
    assert large - small < 96 * size < 4 * dim * (size - count) / 4
