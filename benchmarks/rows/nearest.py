"""Nearest neighbours in a support set."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Work
from benchmarks.operation import Case, Goal, Setup, compiled, peer, unit
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.kernels.nearest_rows import nearest_rows

IMAGES = 50_000
"""Ids are drawn from as many."""
SIZE = 512, 98304, 256


def ours(query: Tensor, table: Tensor, k: int = 1, **ids: Tensor) -> Tensor:
    """What a support set does."""
    return table[nearest_rows(query, table, k, **ids).index]


def plain(query: Tensor, table: Tensor) -> Tensor:
    """The formula, as a (N, K) matrix of similarities."""
    return table[(query @ table.T).max(dim=1)[1]]


def plain_without_own(query: Tensor, table: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """The formula without the rows of the query's own image."""
    similarity = query @ table.T
    similarity.masked_fill_(own.unsqueeze(1) == ids, float("-inf"))
    return table[similarity.max(dim=1)[1]]


def written_out(query: Tensor, bank: Tensor) -> Tensor:
    """The operations of lightly's bank, for where that is not installed."""
    copy = bank.clone()
    similarity = F.normalize(query, dim=1) @ F.normalize(copy, dim=1).T
    return copy.index_select(0, similarity.argmax(dim=1))


def tensors(effort: Effort, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Queries and table."""
    batch, size, dim = shape
    return unit(effort, effort.size(batch), dim), unit(effort, effort.size(size), dim)


def share_of_others(found: Tensor, expected: Tensor) -> float:
    """Share of queries with another row; rows are random: equal embeddings are the same row."""
    batch = len(expected)
    same = (found.reshape(batch, -1) == expected.reshape(batch, -1)).all(1)
    return 1 - float(same.float().mean())


def one(effort: Effort, shape: tuple[int, int, int]) -> Setup:
    """Variants of finding the nearest row."""
    query, table = tensors(effort, shape)
    theirs, held = host.load().solo.methods.NNCLR.find_nn, SimpleNamespace(queue=table)

    def lightly(module: Any) -> Work:
        bank = module.NNMemoryBankModule(size=tuple(table.shape)).to(effort.device)
        bank.bank.copy_(table)
        return lambda: bank(query, update=False)

    return Setup(
        {
            "ours": lambda: ours(query, table),
            "solo-learn": lambda: theirs(held, query)[1],
            "lightly": peer("lightly.models.modules", lightly),
            "plain (lightly)": lambda: written_out(query, table),
            "compiled": compiled(effort, plain, query, table),
        },
        share_of_others,
    )


def not_the_own(effort: Effort) -> Setup:
    """Variants of finding the nearest row that is not of the query's own image."""
    query, table = tensors(effort, SIZE)
    ids = query.new_empty(len(table)).random_(IMAGES).long()
    own = query.new_empty(len(query)).random_(IMAGES).long()
    return Setup(
        {
            "ours": lambda: ours(query, table, query_ids=own, table_ids=ids),
            "plain": lambda: plain_without_own(query, table, own, ids),
        },
        share_of_others,
    )


def five(effort: Effort) -> Setup:
    """Variants of finding the five nearest rows."""
    query, table = tensors(effort, SIZE)
    return Setup(
        {
            "ours": lambda: ours(query, table, 5),
            "plain": lambda: table[(query @ table.T).topk(5, dim=1)[1]],
        },
        share_of_others,
    )


CASES = (
    Case(
        "nearest 512 x 98,304 x 256",
        partial(one, shape=SIZE),
        (
            Goal("solo-learn", 1.3, 12, most_difference=0, most_launches=5),
            Goal("lightly", 1.6, 24, most_difference=0),
            Goal("plain (lightly)", 1.6, 24, most_difference=0),
            Goal("compiled", 0, most_difference=0),
            Goal("plain (lightly)", 3.0, device="cuda", most_ms=0.1),
            # Under autocast its products are in bfloat16: its rows are not always the nearest.
            Goal("solo-learn", 0, device="cuda"),
        ),
    ),
    Case(
        "nearest 256 x 65,536 x 128",
        partial(one, shape=(256, 65536, 128)),
        (Goal("solo-learn", 0, most_difference=0), Goal("lightly", 0, most_difference=0)),
    ),
    Case(
        "nearest 256 x 16,384 x 128",
        partial(one, shape=(256, 16384, 128)),
        (Goal("solo-learn", 0, most_difference=0), Goal("lightly", 0, most_difference=0)),
    ),
    Case(
        "nearest but the own image 512 x 98,304 x 256",
        not_the_own,
        (Goal("plain", 0, most_difference=0),),
    ),
    Case("five nearest 512 x 98,304 x 256", five, (Goal("plain", 0, most_difference=0),)),
)
