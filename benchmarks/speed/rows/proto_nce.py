"""ProtoNCE at three granularities."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.speed.effort import Effort
from benchmarks.speed.operation import Case, Goal, Operation, Setup
from benchmarks.speed.peers import NOT_IMPLEMENTED, compiled
from benchmarks.speed.rows.inputs import across, relative, unit
from solo_ext.losses import proto_nce_loss_func

BATCH, DIM = 256, 128
IMAGENET = (25000, 50000, 100000), 16384
CIFAR = (250, 500, 1000), 200


def sampled(
    query: Tensor, table: Tensor, phi: Tensor, assignments: Tensor, negatives: int
) -> Tensor:
    """The formula with negatives drawn on the host, from a list of what is no positive."""
    ids = assignments.tolist()
    others = sorted(set(range(len(table))) - set(ids))
    columns = torch.tensor(ids + random.sample(others, negatives), device=query.device)
    logits = query @ table[columns].T / phi[columns]
    return F.cross_entropy(logits, torch.arange(len(ids), device=query.device))


def drawn(query: Tensor, table: Tensor, phi: Tensor, assignments: Tensor, negatives: int) -> Tensor:
    """Ours with as many negatives, drawn as the method does."""
    lots = torch.rand(len(table), device=query.device)
    ids = lots.index_fill(0, assignments, -1.0).topk(negatives).indices
    return proto_nce_loss_func(query, table, phi, assignments, ids)


def plain_all(query: Tensor, table: Tensor, phi: Tensor, ids: Tensor) -> Tensor:
    """The formula over all prototypes, as a (N, K) matrix of logits."""
    return F.cross_entropy(query @ table.T / phi, ids)


def setup(effort: Effort, sizes: tuple[int, ...], negatives: int) -> Setup:
    """Variants of the mean over the granularities."""
    batch = effort.size(BATCH)
    query = unit(effort, batch, DIM).requires_grad_()
    tables = []
    for full in sizes:
        size = effort.size(full, least=4 * batch)
        phi = 0.1 + 0.2 * torch.rand(size, device=effort.device)
        ids = torch.randint(size, (batch,), device=effort.device)
        tables.append((unit(effort, size, DIM), phi, ids))
    # No more can be drawn than what is nobody's positive.
    count = min(negatives, *(len(table) - len(ids.unique()) for table, _, ids in tables))

    def gradient(loss: Callable[..., Tensor], *rest: int) -> Tensor:
        terms = [loss(query, *table, *rest) for table in tables]
        return torch.autograd.grad(torch.stack(terms).mean(), query)[0]

    made = compiled(effort, lambda: gradient(plain_all))
    return Setup(
        {
            "ours": lambda: gradient(proto_nce_loss_func),
            "drawn": lambda: gradient(drawn, count),
            "PCL's sampling": lambda: gradient(sampled, count),
            "plain, all": lambda: gradient(plain_all),
            "compiled, all": made,
            "bfloat16": NOT_IMPLEMENTED,
            "drawn, bfloat16": NOT_IMPLEMENTED,
        },
        lambda found, expected: relative(across(found, query), across(expected, query)),
    )


PEER = "PCL's sampling"
ROW = Operation(
    "proto-nce",
    (
        Case(
            "ProtoNCE 256 x (25,000 + 50,000 + 100,000)",
            partial(setup, sizes=IMAGENET[0], negatives=IMAGENET[1]),
            (
                Goal(PEER, 2.0, 25, ours="drawn"),
                Goal(PEER, 0),
                Goal("plain, all", 0),
                Goal("compiled, all", 0),
                Goal(PEER, 5.0, ours="drawn, bfloat16"),
                Goal(PEER, 1.6, ours="bfloat16"),
                Goal(PEER, 20.0, device="cuda"),
            ),
        ),
        Case(
            "ProtoNCE 256 x (250 + 500 + 1,000)",
            partial(setup, sizes=CIFAR[0], negatives=CIFAR[1]),
            (Goal(PEER, 0, ours="drawn"), Goal(PEER, 0)),
        ),
    ),
)
