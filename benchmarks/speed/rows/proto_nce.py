"""ProtoNCE at three granularities."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.interleaved import Work
from benchmarks.speed.operation import (
    EXACT,
    NARROW,
    Case,
    Goal,
    Operation,
    Setup,
    across,
    compiled,
    relative,
    unit,
)
from benchmarks.speed.target import Effort
from solo_ext.losses.info_nce import plain_proto_nce, proto_nce_loss_func

BATCH, DIM = 256, 128
IMAGENET = (25000, 50000, 100000), 16384
CIFAR = (250, 500, 1000), 200
PEER = "PCL's sampling"


Table = tuple[Tensor, Tensor, Tensor]
"""Prototypes, concentrations and assignments."""


def sampled(query: Tensor, table: Table, negatives: int) -> Tensor:
    """The formula with negatives drawn on the host, from a list of what is no positive."""
    ids = table[2].tolist()
    others = list(set(range(len(table[0]))) - set(ids))
    return plain_drawn(query, table, torch.tensor(random.sample(others, negatives)))


def plain_drawn(query: Tensor, table: Table, negatives: Tensor) -> Tensor:
    """The formula with the negatives of these ids."""
    return plain_proto_nce(query, *table, negatives.to(query.device))


def drawn(query: Tensor, table: Table, negatives: int, **dtype: Any) -> Tensor:
    """Ours with as many negatives, drawn as the method does."""
    prototypes, _, assignments = table
    lots = torch.rand(len(prototypes), device=query.device)
    ids = lots.index_fill_(0, assignments, -1.0).topk(negatives, sorted=False).indices
    return proto_nce_loss_func(query, *table, ids, **dtype)


def ours(query: Tensor, table: Table, *ids: Tensor, **dtype: Any) -> Tensor:
    """Over all prototypes, or those of these ids."""
    return proto_nce_loss_func(query, *table, *ids, **dtype)


def plain_all(query: Tensor, table: Table) -> Tensor:
    """The formula over all prototypes, as a (N, K) matrix of logits."""
    return plain_proto_nce(query, *table)


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
    free = [sorted(set(range(len(t))) - set(ids.tolist())) for t, _, ids in tables]
    count = min(negatives, *map(len, free))
    given = [torch.tensor(random.Random(0).sample(f, count), device=effort.device) for f in free]

    def mean(terms: list[Tensor]) -> Tensor:
        return torch.autograd.grad(torch.stack(terms).mean(), query)[0]

    def of(loss: Callable[..., Tensor], *rest: int, **dtype: Any) -> Work:
        return lambda: mean([loss(query, table, *rest, **dtype) for table in tables])

    def of_given(loss: Callable[..., Tensor], **dtype: Any) -> Work:
        pairs = list(zip(tables, given, strict=True))
        return lambda: mean([loss(query, table, ids, **dtype) for table, ids in pairs])

    narrow = {"compute_dtype": torch.bfloat16}
    return Setup(
        {
            "ours": of(ours),
            "drawn": of(drawn, count),
            PEER: of(sampled, count),
            "plain, all": of(plain_all),
            "compiled, all": compiled(effort, of(plain_all)),
            "bfloat16": of(ours, **narrow),
            "drawn, bfloat16": of(drawn, count, **narrow),
        },
        lambda found, expected: relative(across(found, query), across(expected, query)),
        {
            "drawn": of_given(ours),
            "drawn, bfloat16": of_given(ours, **narrow),
            PEER: of_given(plain_drawn),
        },
    )


ROW = Operation(
    "proto-nce",
    (
        Case(
            "ProtoNCE 256 x (25,000 + 50,000 + 100,000)",
            partial(setup, sizes=IMAGENET[0], negatives=IMAGENET[1]),
            (
                Goal(PEER, 2.0, 25, ours="drawn", most_difference=EXACT),
                Goal(PEER, 0),
                Goal("plain, all", 0, most_difference=EXACT),
                Goal("compiled, all", 0, most_difference=EXACT),
                Goal(PEER, 5.0, ours="drawn, bfloat16", most_difference=NARROW),
                Goal(PEER, 1.6, ours="bfloat16"),
                Goal("plain, all", 0, ours="bfloat16", most_difference=NARROW),
                Goal(PEER, 20.0, device="cuda"),
            ),
        ),
        Case(
            "ProtoNCE 256 x (250 + 500 + 1,000)",
            partial(setup, sizes=CIFAR[0], negatives=CIFAR[1]),
            (Goal(PEER, 0, ours="drawn", most_difference=EXACT), Goal(PEER, 0)),
        ),
    ),
)
