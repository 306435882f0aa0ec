"""InfoNCE against a queue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Work
from benchmarks.operation import (
    EXACT,
    NARROW,
    Case,
    Goal,
    Setup,
    across,
    compiled,
    in_bfloat16,
    peer,
    relative,
    unit,
)
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.losses.info_nce import info_nce_loss_func, plain_info_nce

BATCH, DIM, TEMPERATURE = 256, 128, 0.2


def of_copy(query: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    """The plain form with a copy of the queue at every step, as PCL and MoCo make it."""
    return plain_info_nce(query, key, queue.clone(), TEMPERATURE)


def setup(effort: Effort, size: int) -> Setup:
    """Variants with a queue of ``size``."""
    batch, size = effort.size(BATCH), effort.size(size)
    query, key = unit(effort, batch, DIM).requires_grad_(), unit(effort, batch, DIM)
    queue = unit(effort, size, DIM)
    losses = host.load().solo.losses
    theirs = getattr(losses, "mocov2plus_loss_func", None) or losses.moco_loss_func
    # solo-learn's MoCo v2+ hands its loss a copy of the queue of both views, as columns.
    columns = queue.T.contiguous()

    def gradient(loss: Callable[..., Tensor], *args: Any) -> Tensor:
        return torch.autograd.grad(loss(query, key, *args), query)[0]

    def lightly(module: Any) -> Work:
        loss = module.NTXentLoss(temperature=TEMPERATURE, memory_bank_size=(size, DIM))
        loss = loss.to(effort.device)
        # It takes in the keys of every step, which it cannot leave undone.
        loss.memory_bank.bank.copy_(queue)
        return lambda: gradient(loss)

    def solo_learn() -> Tensor:
        return gradient(theirs, columns.clone(), TEMPERATURE)

    return Setup(
        {
            "ours": lambda: gradient(info_nce_loss_func, queue, TEMPERATURE),
            "bfloat16": in_bfloat16(
                effort, lambda: gradient(info_nce_loss_func, queue, TEMPERATURE, torch.bfloat16)
            ),
            "plain (PCL, MoCo)": lambda: gradient(of_copy, queue),
            "compiled": compiled(effort, lambda: gradient(of_copy, queue)),
            "solo-learn": solo_learn,
            "lightly": peer("lightly.loss", lightly),
        },
        lambda found, expected: relative(across(found, query), across(expected, query)),
    )


PLAIN, COMPILED, SOLO, LIGHTLY = "plain (PCL, MoCo)", "compiled", "solo-learn", "lightly"
LARGE = (
    Goal(PLAIN, 2.6, 50, most_difference=EXACT, most_launches=42),
    Goal(SOLO, 2.8, most_difference=EXACT),
    # Its queue takes in the keys of every call: it is another loss at every call.
    Goal(LIGHTLY, 2.9),
    Goal(COMPILED, 1.3, most_difference=EXACT),
    Goal(PLAIN, 6.5, ours="bfloat16", most_difference=NARROW),
    Goal(PLAIN, 5.0, ours="bfloat16", device="cuda", most_ms=0.06),
    Goal(COMPILED, 1.5, ours="bfloat16", device="cuda"),
    Goal(SOLO, 0, ours="bfloat16", device="cuda"),
)
SMALL = (
    Goal(PLAIN, 1.25, 15, most_difference=EXACT),
    Goal(SOLO, 1.25, most_difference=EXACT),
    Goal(LIGHTLY, 1.25),
    Goal(COMPILED, 1.0, most_difference=EXACT),
    Goal(PLAIN, 3.3, ours="bfloat16", most_difference=NARROW),
)
CASES = (
    Case("InfoNCE 256 x 65,536 x 128", partial(setup, size=65536), LARGE),
    Case("InfoNCE 256 x 16,384 x 128", partial(setup, size=16384), SMALL),
)
