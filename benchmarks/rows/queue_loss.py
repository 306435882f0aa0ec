"""InfoNCE against a queue."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.operation import (
    EXACT,
    NARROW,
    Case,
    Form,
    Goal,
    Setup,
    compiled,
    in_bfloat16,
    of_losses,
    peer,
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
    query, key = unit(effort, BATCH, DIM).requires_grad_(), unit(effort, BATCH, DIM)
    queue = unit(effort, size, DIM)
    losses = host.load().solo.losses
    theirs = getattr(losses, "mocov2plus_loss_func", None) or losses.moco_loss_func
    # solo-learn's MoCo v2+ hands its loss a copy of the queue of both views, as columns.
    columns = queue.T.contiguous()

    def lightly(module: Any) -> Form:
        loss = module.NTXentLoss(temperature=TEMPERATURE, memory_bank_size=tuple(queue.shape))
        loss = loss.to(effort.device)
        # It takes in the keys of every step, which it cannot leave undone.
        loss.memory_bank.bank.copy_(queue)
        return lambda query, key, _: loss(query, key)  # type: ignore[no-any-return]

    ours = partial(info_nce_loss_func, temperature=TEMPERATURE)
    forms: dict[str, Form | str] = {
        "ours": ours,
        "bfloat16": in_bfloat16(effort, partial(ours, compute_dtype=torch.bfloat16)),
        PLAIN: of_copy,
        "compiled": compiled(effort, of_copy),
        "solo-learn": lambda query, key, _: theirs(query, key, columns.clone(), TEMPERATURE),
        "lightly": peer("lightly.loss", lightly),
    }
    return of_losses((query, key, queue), forms)


PLAIN = "plain (PCL, MoCo)"
LARGE = (
    Goal(PLAIN, 2.6, 50, most_difference=EXACT, most_launches=42),
    Goal("solo-learn", 2.8, most_difference=EXACT),
    # Its queue takes in the keys of every call: it is another loss at every call.
    Goal("lightly", 2.9),
    Goal("compiled", 1.3, most_difference=EXACT),
    Goal(PLAIN, 6.5, ours="bfloat16", most_difference=NARROW),
    Goal(PLAIN, 5.0, ours="bfloat16", device="cuda", most_ms=0.06),
    Goal("compiled", 1.5, ours="bfloat16", device="cuda"),
    Goal("solo-learn", 0, ours="bfloat16", device="cuda"),
)
SMALL = (
    Goal(PLAIN, 1.25, 15, most_difference=EXACT),
    Goal("solo-learn", 1.25, most_difference=EXACT),
    Goal("lightly", 1.25),
    Goal("compiled", 1.0, most_difference=EXACT),
    Goal(PLAIN, 3.3, ours="bfloat16", most_difference=NARROW),
)
CASES = (
    Case("InfoNCE 256 x 65,536 x 128", partial(setup, size=65536), LARGE),
    Case("InfoNCE 256 x 16,384 x 128", partial(setup, size=16384), SMALL),
)
