"""What the losses with many prototypes or a long queue hold at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.losses import proto_nce_loss_func, protocpc_step, seed_loss_func

PeakBytes = Callable[[Callable[[], Any]], int]
N, D = 256, 8


def unit(rows: int) -> Tensor:
    return F.normalize(torch.randn(rows, D), dim=1)


@pytest.mark.parametrize(("dtype", "share"), [(None, 1.0), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("learns", [False, True])
def test_step_holds_the_teachers_exponentials_alone(
    peak_bytes: PeakBytes, learns: bool, dtype: torch.dtype | None, share: float
) -> None:
    """And a gradient; the samples' blocks are a constant."""
    size = 2**17
    student, prototypes = unit(N).requires_grad_(), unit(size).requires_grad_(learns)
    views, prior = (student.unsqueeze(0), unit(N).unsqueeze(0)), torch.ones(size)
    wanted = (student, prototypes) if learns else (student,)
    peak = peak_bytes(
        lambda: torch.autograd.grad(
            protocpc_step(*views, prototypes, prior, compute_dtype=dtype).loss, wanted
        )
    )
    matrix = 4 * N * size
    rows = 4 * size * (D * (learns + 1) + 16)
    assert share * matrix < peak < share * matrix + rows + 1.3 * 2**25


def test_memory_of_seed_does_not_grow_with_the_queue(peak_bytes: PeakBytes) -> None:
    student, teacher = unit(N).requires_grad_(), unit(N)
    peaks = []
    for size in (2**13, 2**15):
        queue = unit(size)
        peaks.append(
            peak_bytes(
                lambda queue=queue: torch.autograd.grad(  # type: ignore[misc]
                    seed_loss_func(student, teacher, queue), student
                )
            )
        )
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 4 * N * 2**15 / 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("collisions", ["paper", "merge"])
def test_proto_nce_does_not_grow_with_what_is_drawn(
    peak_bytes: PeakBytes, dtype: torch.dtype | None, collisions: Any
) -> None:
    """But by the drawn ids and their concentrations, a few numbers for each."""
    count, dim, size = 64, 128, 2**15
    query = torch.randn(count, dim, requires_grad=True)
    prototypes = F.normalize(torch.randn(size, dim), dim=1)
    phi, positives, lots = (
        0.1 + 0.2 * torch.rand(size),
        torch.arange(count),
        torch.randperm(size - count) + count,
    )

    def peak(drawn: int) -> int:
        given = prototypes, phi, positives, lots[:drawn], collisions, dtype
        return peak_bytes(lambda: proto_nce_loss_func(query, *given).backward())

    small, large = peak(2**12), peak(size - count)
    assert small > 2**20, "the tile itself must be seen"
    assert large - small < 96 * size < 4 * dim * (size - count) / 4, (
        "a quarter of a copy of their rows"
    )
