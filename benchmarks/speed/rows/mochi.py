"""MoCHi: mixed hard negatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.interleaved import Work
from benchmarks.speed.effort import Effort
from benchmarks.speed.operation import EXACT, Case, Goal, Operation, Setup
from benchmarks.speed.rows.inputs import across, relative, unit
from solo_ext.kernels import MixDraws
from solo_ext.losses import mochi_loss_func

BATCH, DIM, TEMPERATURE = 256, 128, 0.2
HARD, PAIRS, QUERIES = 1024, 1024, 128


def plain_mochi(
    query: Tensor, key: Tensor, queue: Tensor, hard: int, draws: Callable[[], MixDraws]
) -> Tensor:
    """The formula with the synthetic negatives made, normalised and multiplied."""
    count = len(query)
    with torch.no_grad():
        top = (query @ queue.T).topk(hard, dim=1).indices
        pairs, alpha, singles, beta = draws()
        first, second = (top.gather(1, pairs[:, :, side].long()) for side in range(2))
        share = alpha.unsqueeze(2)
        of_pairs = F.normalize(share * queue[first] + (1 - share) * queue[second], dim=2)
        single, share = top.gather(1, singles.long()), beta.unsqueeze(2)
        with_query = share * query.unsqueeze(1) + (1 - share) * queue[single]
        made = torch.cat((of_pairs, F.normalize(with_query, dim=2)), 1)
    own = (query * key).sum(1, keepdim=True)
    logits = torch.cat((own, query @ queue.T, torch.einsum("nd,nsd->ns", query, made)), 1)
    return F.cross_entropy(
        logits / TEMPERATURE, torch.zeros(count, dtype=torch.long, device=query.device)
    )


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

    if loop:
        by_loop = of(plain_mochi, counts[0], draws.one_by_one)
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
            PLAIN: of(plain_mochi, counts[0], draws.at_once),
        },
        lambda found, expected: relative(across(found, exact[0]), across(expected, exact[0])),
        {
            "ours": of_given(mochi_loss_func, TEMPERATURE, *counts, given),
            PLAIN: of_given(plain_mochi, counts[0], lambda: given),
        },
    )


PLAIN, LOOP = "plain (davidsvy)", "drawn in a loop (MaugrimEP)"
ROW = Operation(
    "mochi",
    (
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
    ),
)
