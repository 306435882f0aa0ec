"""MoCHi: mixed hard negatives."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.operation import EXACT, Case, Form, Goal, Setup, of_losses, unit
from benchmarks.record import Effort
from solo_ext.losses import MixDraws, mochi_loss_func
from solo_ext.losses.mochi import plain_mochi

BATCH, DIM, TEMPERATURE = 256, 128, 0.2
MIXED = 1024, 1024, 128


def setup(effort: Effort, size: int) -> Setup:
    """Variants with a queue of ``size``."""
    query, key = unit(effort, BATCH, DIM).requires_grad_(), unit(effort, BATCH, DIM)
    inputs = query, key, unit(effort, size, DIM)
    hard, pairs, singles = counts = [effort.size(n) for n in MIXED]

    def draws() -> MixDraws:
        """By one call for each kind."""
        shape, device = (len(query), singles), effort.device
        return MixDraws(
            torch.randint(hard, (len(query), pairs, 2), device=device),
            torch.rand(len(query), pairs, device=device),
            torch.randint(hard, shape, device=device),
            torch.rand(shape, device=device) / 2,
        )

    def ours(*inputs: Any, given: MixDraws | None = None) -> Tensor:
        return mochi_loss_func(*inputs, TEMPERATURE, *counts, given)

    def plain(q: Tensor, k: Tensor, queue: Tensor, given: MixDraws | None = None) -> Tensor:
        return plain_mochi(q, k, queue, hard, given or draws(), TEMPERATURE)

    # In fp32 negatives that are as hard as each other, but for the last bit, are ranked either way.
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    drawn = draws()
    drawn = drawn._replace(alpha=drawn.alpha.double(), beta=drawn.beta.double())
    forms: dict[str, Form] = {"ours": ours, PLAIN: plain}
    return of_losses(inputs, forms, {n: partial(f, given=drawn) for n, f in forms.items()}, exact)


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
        (Goal(PLAIN, 2.8, 20, most_difference=EXACT), Goal(PLAIN, 2.5, device="cuda")),
    ),
)
