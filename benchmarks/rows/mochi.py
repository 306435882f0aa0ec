"""MoCHi: mixed hard negatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Work
from benchmarks.operation import EXACT, Case, Goal, Setup, across, relative, unit
from benchmarks.record import Effort
from solo_ext.losses import MixDraws, mochi_loss_func
from solo_ext.losses.mochi import plain_mochi

BATCH, DIM, TEMPERATURE = 256, 128, 0.2
HARD, PAIRS, QUERIES = 1024, 1024, 128


def drawn(count: int, sizes: Sequence[int], device: str) -> MixDraws:
    """What is mixed for each of ``count`` queries, by one call for each kind."""
    hard, pairs, singles = sizes
    return MixDraws(
        torch.randint(hard, (count, pairs, 2), device=device),
        torch.rand(count, pairs, device=device),
        torch.randint(hard, (count, singles), device=device),
        torch.rand(count, singles, device=device) / 2,
    )


def setup(effort: Effort, size: int) -> Setup:
    """Variants with a queue of ``size``."""
    batch = effort.size(BATCH)
    query, key = unit(effort, batch, DIM).requires_grad_(), unit(effort, batch, DIM)
    queue = unit(effort, effort.size(size), DIM)
    counts = [effort.size(n) for n in (HARD, PAIRS, QUERIES)]

    def of(loss: Callable[..., Tensor], *rest: Any) -> Work:
        return lambda: torch.autograd.grad(loss(query, key, queue, *rest), query)[0]

    def plain() -> Tensor:
        draws = drawn(batch, counts, effort.device)
        loss = plain_mochi(query, key, queue, counts[0], draws, TEMPERATURE)
        return torch.autograd.grad(loss, query)[0]

    # In fp32 negatives that are as hard as each other, but for the last bit, are ranked either way.
    exact = query.detach().double().requires_grad_(), key.double(), queue.double()
    draws = drawn(batch, counts, effort.device)
    given = draws._replace(alpha=draws.alpha.double(), beta=draws.beta.double())

    def of_given(loss: Callable[..., Tensor], *rest: Any) -> Work:
        return lambda: torch.autograd.grad(loss(*exact, *rest), exact[0])[0]

    return Setup(
        {"ours": of(mochi_loss_func, TEMPERATURE, *counts), PLAIN: plain},
        lambda found, expected: relative(across(found, exact[0]), across(expected, exact[0])),
        {
            "ours": of_given(mochi_loss_func, TEMPERATURE, *counts, given),
            PLAIN: of_given(plain_mochi, counts[0], given, TEMPERATURE),
        },
    )


PLAIN = "plain (davidsvy)"
CASES = (
    Case(
        "MoCHi (1024, 1024, 128), K 16,384",
        partial(setup, size=16384),
        (Goal(PLAIN, 2.5, 30, most_difference=EXACT, most_launches=139),),
    ),
    Case(
        "MoCHi (1024, 1024, 128), K 65,536",
        partial(setup, size=65536),
        (
            Goal(PLAIN, 2.8, 20, most_difference=EXACT),
            Goal(PLAIN, 2.5, device="cuda"),
        ),
    ),
)
