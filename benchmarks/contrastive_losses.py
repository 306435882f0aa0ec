"""Debiased, hard-negative and MoCHi losses beside solo-learn's SimCLR loss and plain formulations.

    python benchmarks/contrastive_losses.py [--json FILE]

Forward and backward on one thread, all variants in turn, eleven rounds after ten to warm up; the
ratio is that of the median round to ours of the same round, `again` is ours a second time (what
equals differ by). solo-learn's is the loss of its own base method, the plain forms are written
from the formulas as their authors' code computes them: similarities, a mask of own columns,
exponentials; and for MoCHi synthetic negatives that are made, normalised and multiplied. Memory is
the largest sum of live allocations beyond the inputs.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import Record, Work, peak_mib, race, show
from torch import Tensor

from solo_ext import host
from solo_ext.losses import (
    debiased_loss_func,
    hard_negative_loss_func,
    mochi_loss_func,
    nt_xent_loss_func,
)

ROUNDS, DIM, TEMPERATURE, TAU, BETA = 11, 128, 0.5, 0.1, 1.0
BATCH, HARD, PAIRS, QUERIES = 256, 1024, 1024, 128


def unit(rows: int) -> Tensor:
    """Random unit rows."""
    return F.normalize(torch.randn(rows, DIM), dim=1)


def plain_estimate(z1: Tensor, z2: Tensor, beta: float) -> Tensor:
    """Debiased, and with ``beta`` hard negatives, on the (2N, 2N) matrix of exponentials."""
    rows = F.normalize(torch.cat((z1, z2)), dim=1)
    count = len(rows)
    own = torch.eye(count, dtype=torch.bool)
    own |= own.roll(count // 2, 0)
    negative = torch.exp(rows @ rows.T / TEMPERATURE).masked_select(~own).view(count, -1)
    positive = torch.exp((rows * rows.roll(count // 2, 0)).sum(1) / TEMPERATURE)
    weights = (beta * negative.log()).exp()
    mass = (weights * negative).sum(1) / weights.mean(1)
    size = count - 2
    estimate = (mass - TAU * size * positive) / (1 - TAU)
    estimate = estimate.clamp(min=size * math.exp(-1 / TEMPERATURE))
    return -torch.log(positive / (positive + estimate)).mean()


def plain_mochi(query: Tensor, key: Tensor, queue: Tensor) -> Tensor:
    """MoCHi with the synthetic negatives made."""
    count = len(query)
    with torch.no_grad():
        top = (query @ queue.T).topk(HARD, dim=1).indices
        first, second = (top.gather(1, torch.randint(HARD, (count, PAIRS))) for _ in range(2))
        share = torch.rand(count, PAIRS, 1)
        of_pairs = F.normalize(share * queue[first] + (1 - share) * queue[second], dim=2)
        single = top.gather(1, torch.randint(HARD, (count, QUERIES)))
        share = torch.rand(count, QUERIES, 1) / 2
        with_query = share * query.unsqueeze(1) + (1 - share) * queue[single]
        made = torch.cat((of_pairs, F.normalize(with_query, dim=2)), 1)
    own = (query * key).sum(1, keepdim=True)
    logits = torch.cat((own, query @ queue.T, torch.einsum("nd,nsd->ns", query, made)), 1)
    return F.cross_entropy(logits / 0.2, torch.zeros(count, dtype=torch.long))


def in_batch(size: int) -> dict[str, tuple[list[Tensor], Any]]:
    """Losses of two views of ``size`` images."""
    z1, z2 = torch.randn(size, DIM), torch.randn(size, DIM)
    views = [z1.requires_grad_(), (z1.detach() + z2).requires_grad_()]
    theirs = host.load().solo.losses.simclr_loss_func
    if "indexes" in inspect.signature(theirs).parameters:
        ids = torch.arange(size).repeat(2)

        def simclr() -> Tensor:
            return theirs(torch.cat(views), ids, temperature=TEMPERATURE)  # type: ignore[no-any-return]
    else:

        def simclr() -> Tensor:
            return theirs(*views, temperature=TEMPERATURE)  # type: ignore[no-any-return]

    return {
        "debiased": (views, lambda: debiased_loss_func(*views, TEMPERATURE, TAU)),
        "again": (views, lambda: debiased_loss_func(*views, TEMPERATURE, TAU)),
        "hard": (views, lambda: hard_negative_loss_func(*views, TEMPERATURE, TAU, BETA)),
        "NT-Xent": (views, lambda: nt_xent_loss_func(*views, TEMPERATURE)),
        "SimCLR, host": (views, simclr),
        "plain debias": (views, lambda: plain_estimate(views[0], views[1], 0.0)),
        "plain hard": (views, lambda: plain_estimate(views[0], views[1], BETA)),
    }


def mochi(size: int) -> dict[str, tuple[list[Tensor], Any]]:
    """MoCHi over a queue of ``size``."""
    query, key, queue = unit(BATCH).requires_grad_(), unit(BATCH), unit(size)
    numbers = 0.2, HARD, PAIRS, QUERIES
    return {
        "ours": ([query], lambda: mochi_loss_func(query, key, queue, *numbers)),
        "again": ([query], lambda: mochi_loss_func(query, key, queue, *numbers)),
        "plain": ([query], lambda: plain_mochi(query, key, queue)),
    }


def main() -> None:
    """Prints a table per loss and size."""
    found = Record(__doc__)
    for label, make, sizes in (("2N", in_batch, (512, 4096)), ("MoCHi K", mochi, (16384, 65536))):
        for size in sizes:
            variants = make(size // 2 if make is in_batch else size)
            steps: dict[str, Work] = {
                name: lambda inputs=inputs, loss=loss: torch.autograd.grad(loss(), inputs)
                for name, (inputs, loss) in variants.items()
            }
            rows = race(steps, ROUNDS)
            print(f"{label} {size}, D {DIM}")
            found[f"{label} {size}"] = {}
            for name, row in rows.items():
                whole: dict[str, Any] = {**row, "mib": peak_mib(steps[name])}
                found[f"{label} {size}"][name] = whole
                show(name, whole)
    found.write()


if __name__ == "__main__":
    main()
