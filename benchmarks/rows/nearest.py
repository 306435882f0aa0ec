"""Nearest neighbours in a support set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Work
from benchmarks.operation import Case, Goal, Setup, peer, unit
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.kernels.nearest_rows import nearest_rows

BATCH, SIZE, DIM = 512, 98304, 256


def plain(query: Tensor, bank: Tensor) -> Tensor:
    """The operations of lightly's bank."""
    copy = bank.clone()
    similarity = F.normalize(query, dim=1) @ F.normalize(copy, dim=1).T
    return copy.index_select(0, similarity.argmax(dim=1))


def share_of_others(found: Tensor, expected: Tensor) -> float:
    """Share of queries with another row; rows are random: equal embeddings are the same row."""
    return 1 - float((found.reshape(expected.shape) == expected).all(1).float().mean())


def setup(effort: Effort) -> Setup:
    """Variants of finding the nearest row."""
    query, table = unit(effort, BATCH, DIM), unit(effort, SIZE, DIM)
    theirs, held = host.load().solo.methods.NNCLR.find_nn, SimpleNamespace(queue=table)

    def lightly(module: Any) -> Work:
        memory = module.NNMemoryBankModule(size=tuple(table.shape)).to(effort.device)
        memory.bank.copy_(table)
        return lambda: memory(query, update=False)

    return Setup(
        {
            "ours": lambda: table[nearest_rows(query, table).index],
            "solo-learn": lambda: theirs(held, query)[1],
            "lightly": peer("lightly.models.modules", lightly),
            PLAIN: lambda: plain(query, table),
        },
        share_of_others,
    )


PLAIN = "plain (lightly)"
CASES = (
    Case(
        "nearest 512 x 98,304 x 256",
        setup,
        (
            Goal("solo-learn", 1.3, 12, most_difference=0, most_launches=5),
            Goal("lightly", 1.6, 24, most_difference=0),
            Goal(PLAIN, 1.6, 24, most_difference=0),
            Goal(PLAIN, 3.0, device="cuda", most_ms=0.1),
            # Under autocast its products are in bfloat16: its rows are not always the nearest.
            Goal("solo-learn", 0, device="cuda"),
        ),
    ),
)
