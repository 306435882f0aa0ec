"""MoCHi: mixed hard negatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.interleaved import Work
from benchmarks.speed.operation import EXACT, Case, Goal, Setup, across, relative, unit
from benchmarks.speed.target import Effort
from solo_ext.losses import MixDraws, mochi_loss_func
from solo_ext.losses.mochi import plain_mochi

BATCH, DIM, TEMPERATURE = 256, 128, 0.2
HARD, PAIRS, QUERIES = 1024, 1024, 128


class Draws(NamedTuple):
    """Draws of what is mixed.

    Attributes:
        count: of queries.
        hard: mined negatives of each.
        pairs: mixtures of two of them.
        singles: mixtures of one with the query.
        device: where they are wanted.
    """

    count: int
    hard: int
    pairs: int
    singles: int
    device: str

    def at_once(self) -> MixDraws:
        """By one call for each kind, as davidsvy's code does."""
        pairs = torch.randint(self.hard, (self.count, self.pairs, 2), device=self.device)
        singles = torch.randint(self.hard, (self.count, self.singles), device=self.device)
        return self._with_shares(pairs, singles)

    def one_by_one(self) -> MixDraws:
        """By a permutation for every synthetic negative, as MaugrimEP's code does."""

        def places(columns: int, number: int) -> Tensor:
            rows = range(self.count * columns)
            drawn = torch.stack([torch.randperm(self.hard)[:number] for _ in rows])
            return drawn.view(self.count, columns, number).to(self.device)

        return self._with_shares(places(self.pairs, 2), places(self.singles, 1).squeeze(2))

    def _with_shares(self, pairs: Tensor, singles: Tensor) -> MixDraws:
        alpha = torch.rand(self.count, self.pairs, device=self.device)
        beta = torch.rand(self.count, self.singles, device=self.device) / 2
        return MixDraws(pairs, alpha, singles, beta)


def setup(effort: Effort, size: int, loop: bool = False) -> Setup:
    """Variants with a queue of ``size``, beside a plain form that draws at once or in a loop."""
    batch = effort.size(BATCH)
    query, key = unit(effort, batch, DIM).requires_grad_(), unit(effort, batch, DIM)
    queue = unit(effort, effort.size(size), DIM)
    counts = [effort.size(n) for n in (HARD, PAIRS, QUERIES)]
    draws = Draws(batch, *counts, effort.device)

    def of(loss: Callable[..., Tensor], *rest: Any) -> Work:
        return lambda: torch.autograd.grad(loss(query, key, queue, *rest), query)[0]

    def plain(draw: Callable[[], MixDraws]) -> Work:
        return lambda: torch.autograd.grad(
            plain_mochi(query, key, queue, counts[0], draw(), TEMPERATURE), query
        )[0]

    if loop:
        by_loop = plain(draws.one_by_one)
        return Setup({"ours": of(mochi_loss_func, TEMPERATURE, *counts), LOOP: by_loop})
    # In fp32 negatives that are as hard as each other, but for the last bit, are ranked either way.
    exact = query.detach().double().requires_grad_(), key.double(), queue.double()
    drawn = draws.at_once()
    given = drawn._replace(alpha=drawn.alpha.double(), beta=drawn.beta.double())

    def of_given(loss: Callable[..., Tensor], *rest: Any) -> Work:
        return lambda: torch.autograd.grad(loss(*exact, *rest), exact[0])[0]

    return Setup(
        {
            "ours": of(mochi_loss_func, TEMPERATURE, *counts),
            PLAIN: plain(draws.at_once),
        },
        lambda found, expected: relative(across(found, exact[0]), across(expected, exact[0])),
        {
            "ours": of_given(mochi_loss_func, TEMPERATURE, *counts, given),
            PLAIN: of_given(plain_mochi, counts[0], given, TEMPERATURE),
        },
    )


PLAIN, LOOP = "plain (davidsvy)", "drawn in a loop (MaugrimEP)"
CASES = (
    Case(
        "MoCHi (1024, 1024, 128), K 16,384",
        partial(setup, size=16384),
        (Goal(PLAIN, 2.5, 30, most_difference=EXACT),),
    ),
    Case(
        "MoCHi (1024, 1024, 128), K 65,536",
        partial(setup, size=65536),
        (
            Goal(PLAIN, 2.8, 20, most_difference=EXACT),
            Goal(PLAIN, 2.5, device="cuda"),
        ),
    ),
    Case(
        "MoCHi (1024, 1024, 128), K 16,384, once more",
        partial(setup, size=16384, loop=True),
        (Goal(LOOP, 20),),
        most_rounds=2,
    ),
)
