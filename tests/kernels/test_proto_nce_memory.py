"""What ProtoNCE holds at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from solo_ext.losses import proto_nce_loss_func

PeakBytes = Callable[[Callable[[], Any]], int]
N, D, K = 64, 128, 2**15


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("collisions", ["paper", "merge"])
def test_does_not_grow_with_what_is_drawn(
    peak_bytes: PeakBytes, dtype: torch.dtype | None, collisions: Any
) -> None:
    """But by the drawn ids and their concentrations, a few numbers for each."""
    query = torch.randn(N, D, requires_grad=True)
    prototypes = F.normalize(torch.randn(K, D), dim=1)
    phi, positives, lots = 0.1 + 0.2 * torch.rand(K), torch.arange(N), torch.randperm(K - N) + N

    def peak(drawn: int) -> int:
        given = prototypes, phi, positives, lots[:drawn], collisions, dtype
        return peak_bytes(lambda: proto_nce_loss_func(query, *given).backward())

    small, large = peak(2**12), peak(K - N)
    assert small > 2**20, "the tile itself must be seen"
    assert large - small < 96 * K < 4 * D * (K - N) / 4, "a quarter of a copy of their rows"
