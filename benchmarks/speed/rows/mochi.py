"""MoCHi: mixed hard negatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.interleaved import Work
from benchmarks.speed.effort import Effort
from benchmarks.speed.operation import Case, Goal, Operation, Setup
from benchmarks.speed.rows.inputs import unit
from solo_ext.losses import mochi_loss_func

BATCH, DIM, TEMPERATURE = 256, 128, 0.2
HARD, PAIRS, QUERIES = 1024, 1024, 128


def plain_mochi(
    query: Tensor, key: Tensor, queue: Tensor, hard: int, pairs: int, queries: int
) -> Tensor:
    """The formula with the synthetic negatives made, normalised and multiplied."""
    count, device = len(query), query.device
    with torch.no_grad():
        top = (query @ queue.T).topk(hard, dim=1).indices

        def chosen(number: int) -> Tensor:
            return top.gather(1, torch.randint(hard, (count, number), device=device))

        first, second = chosen(pairs), chosen(pairs)
        share = torch.rand(count, pairs, 1, device=device)
        of_pairs = F.normalize(share * queue[first] + (1 - share) * queue[second], dim=2)
        single, share = chosen(queries), torch.rand(count, queries, 1, device=device) / 2
        with_query = share * query.unsqueeze(1) + (1 - share) * queue[single]
        made = torch.cat((of_pairs, F.normalize(with_query, dim=2)), 1)
    own = (query * key).sum(1, keepdim=True)
    logits = torch.cat((own, query @ queue.T, torch.einsum("nd,nsd->ns", query, made)), 1)
    return F.cross_entropy(
        logits / TEMPERATURE, torch.zeros(count, dtype=torch.long, device=device)
    )


def setup(effort: Effort, size: int) -> Setup:
    """Variants with a queue of ``size``."""
    batch = effort.size(BATCH)
    query, key = unit(effort, batch, DIM).requires_grad_(), unit(effort, batch, DIM)
    queue = unit(effort, effort.size(size), DIM)
    counts = [effort.size(n) for n in (HARD, PAIRS, QUERIES)]

    def of(loss: Callable[..., Tensor], *rest: Any) -> Work:
        return lambda: torch.autograd.grad(loss(query, key, queue, *rest), query)[0]

    return Setup(
        {"ours": of(mochi_loss_func, TEMPERATURE, *counts), "plain": of(plain_mochi, *counts)}
    )


ROW = Operation(
    "mochi",
    (
        Case(
            "MoCHi (1024, 1024, 128), K 16,384",
            partial(setup, size=16384),
            (Goal("plain", 2.5, 30),),
        ),
        Case(
            "MoCHi (1024, 1024, 128), K 65,536",
            partial(setup, size=65536),
            (Goal("plain", 2.8, 20), Goal("plain", 2.5, device="cuda")),
        ),
    ),
)
