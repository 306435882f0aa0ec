"""What each of several gloo processes computes for ``test_distributed.py``.

A module of its own because a spawned process imports the function that it runs by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.contrastive import (
    PLAIN,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    nt_xent_loss_func,
    two_view_terms,
)
from solo_ext.losses.info_nce import info_nce_loss_func
from solo_ext.losses.mochi import Mixing, draw_mixes, mochi_loss_func
from solo_ext.losses.nnclr import nnclr_terms
from solo_ext.memory.features import FeatureBank, FeatureQueue, SupportSet
from solo_ext.memory.prototypes import PrototypePrior
from solo_ext.memory.teacher import TeacherCache

RANKS, VIEWS = int(os.environ.get("RANKS", "2")), 3


class Local(NamedTuple):
    """What a process holds of a batch."""

    views: list[Tensor]
    """(N, 5) each."""
    mixing: Mixing
    """For the anchors of the first view."""
    joint: Mixing
    """For the anchors of all views."""


Found = tuple[Tensor, Tensor]
"""Loss, and share of anchors on the floor."""


def nt_xent(given: Local, temperature: float) -> Found:
    return nt_xent_loss_func(*given.views[:2], temperature), torch.zeros(())


def pair(given: Local, temperature: float, estimator: NegativeEstimator) -> Found:
    terms = two_view_terms(*given.views[:2], temperature, estimator)
    return terms.loss, terms.floored


def of_views(
    given: Local, temperature: float, estimator: NegativeEstimator, mixes: bool = False
) -> Found:
    terms = contrastive(
        **batch_of_views(given.views)._asdict(),
        estimator=estimator,
        mixing=given.joint if mixes else None,
        temperature=temperature,
    )
    return terms.loss, terms.floored


def nnclr(
    given: Local,
    temperature: float,
    symmetric: bool,
    estimator: NegativeEstimator = PLAIN,
    mixes: bool = False,
) -> Found:
    mixing = given.mixing if mixes else None
    loss, rows = nnclr_terms(*given.views[:2], temperature, symmetric, estimator, mixing)
    return loss, rows.floored


def queue() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return F.normalize(torch.randn(12, 5, generator=generator, dtype=torch.float64), dim=1)


def info_nce(given: Local, temperature: float) -> Found:
    return info_nce_loss_func(*given.views[:2], queue(), temperature), torch.zeros(())


def mochi(given: Local, temperature: float) -> Found:
    loss = mochi_loss_func(
        *given.views[:2], queue(), temperature, given.mixing.num_hard, draws=given.mixing.draws
    )
    return loss, torch.zeros(())


LOSSES: dict[str, Callable[[Local, float], Found]] = {
    "nt_xent": nt_xent,
    "debiased without prior": partial(pair, estimator=NegativeEstimator()),
    "debiased": partial(pair, estimator=NegativeEstimator(0.1)),
    "hard": partial(pair, estimator=NegativeEstimator(0.1, 1.0)),
    "hard, detached": partial(pair, estimator=NegativeEstimator(0.1, 1.0, True)),
    "three views": partial(of_views, estimator=PLAIN),
    "three views, hard": partial(of_views, estimator=NegativeEstimator(0.1, 0.5)),
    "three views, mixed": partial(of_views, estimator=NegativeEstimator(0.1, 0.5), mixes=True),
    "nnclr": partial(nnclr, symmetric=True),
    "nnclr, row": partial(nnclr, symmetric=False),
    "nnclr, hard": partial(nnclr, symmetric=True, estimator=NegativeEstimator(0.1, 0.5)),
    "nnclr, mixed": partial(nnclr, symmetric=True, mixes=True),
    "info_nce": info_nce,
    "mochi": mochi,
}


class Case(NamedTuple):
    """A loss on a batch of so many images in each process."""

    batch: int
    temperature: float
    loss: str


CASES = [Case(b, t, name) for b in (1, 2, 7) for t in (0.1, 0.5) for name in LOSSES]


class Step(NamedTuple):
    """What one process, or the only one, gets."""

    loss: Tensor
    floored: Tensor
    gradients: list[Tensor]


def network() -> nn.Module:
    """Returns the same fp64 network in every process, without batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def joined_batch(case: Case) -> Tensor:
    """Returns (views, ranks * batch, 6): all views of the whole batch."""
    generator = torch.Generator().manual_seed(case.batch)
    rows = torch.randn(1, RANKS * case.batch, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(VIEWS, RANKS * case.batch, 6, generator=generator, dtype=torch.float64)
    return rows + noise


def mixings(case: Case, own: slice) -> tuple[Mixing, Mixing]:
    """A process's part of the draws for the whole batch."""
    generator = torch.Generator().manual_seed(case.batch)
    anchors = torch.empty(VIEWS * RANKS * case.batch, 5, dtype=torch.float64)
    # No more than there are other images.
    hard = min(3, RANKS * case.batch - 1)
    draws = draw_mixes(anchors, hard, 4, 2, generator)
    by_view = [x.unflatten(0, (VIEWS, -1))[:, own] for x in draws]
    first = MixDraws(*(x[0] for x in by_view))
    return Mixing(hard, first), Mixing(hard, MixDraws(*(x.flatten(0, 1) for x in by_view)))


def step(case: Case, model: nn.Module, own: slice = slice(None)) -> Step:
    """Runs forward and backward on a part of the batch."""
    inputs = joined_batch(case)[:, own]
    views = model(inputs.flatten(0, 1)).chunk(VIEWS)
    local = Local(list(views), *mixings(case, own))
    loss, floored = LOSSES[case.loss](local, case.temperature)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return Step(loss.detach(), floored, gradients)


def weights(rank: int) -> Tensor:
    """Returns (2 * ranks, 3) weights of a rank's own loss."""
    return torch.arange(6.0 * RANKS).view(-1, 3) * (rank + 1) + 0.5


def gathers(rank: int) -> dict[str, Any]:
    """Gathers tensors of several kinds, with and without gradient."""
    own = torch.arange(6.0).view(2, 3) + 100 * rank
    found: dict[str, Any] = {
        "plain": distributed.gather(own),
        "transposed": distributed.gather(own.T),
        "integer": distributed.gather(torch.tensor([rank, 10 + rank])),
        "leaf": distributed.gather(own.clone().requires_grad_()),
        "rank": distributed.rank(),
        "world_size": distributed.world_size(),
    }
    x = own.clone().requires_grad_()
    y = distributed.gather_with_gradient(x)
    found["with gradient"] = y.detach()
    (y * weights(rank)).sum().backward()
    found["gradient"] = x.grad
    # An expanded, non-contiguous incoming gradient.
    x = own.clone().requires_grad_()
    distributed.gather_with_gradient(x).sum().mul(rank + 1).backward()
    found["gradient of sum"] = x.grad
    # The gradient of a sum is one tensor, which both of its terms receive.
    x, bias = own.clone().requires_grad_(), torch.ones(2 * RANKS, 3, requires_grad=True)
    shifted = 2 * bias
    ((distributed.gather_with_gradient(x) + shifted) * weights(rank)).sum().backward()
    found["gradient of bias"] = bias.grad
    found["gradient beside bias"] = x.grad
    return found


def state(own: slice = slice(None)) -> dict[str, Tensor]:
    """Buffers of modules that take in the rows of all processes, two batches."""
    queue, support, bank, cache = (
        FeatureQueue(24, 3),
        SupportSet(24, 3),
        FeatureBank(3),
        TeacherCache(3),
    )
    bank.resize_(24)
    cache.resize_(24)
    prior = PrototypePrior(3, 0.7)
    held = nn.ModuleDict({"queue": queue, "support": support, "bank": bank, "cache": cache})
    held["prior"] = prior
    held.double()
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randperm(24, generator=generator)
    for batch in numbers.view(2, 12):
        rows = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        part, ids = F.normalize(rows, dim=1)[own], batch[own]
        joined, all_ids = distributed.gather(part), distributed.gather(ids)
        queue.update_(joined)
        support.update_(joined, all_ids, all_ids % 3)
        bank.update_(all_ids, joined)
        cache.update_(ids, part)
        prior.update_(part.softmax(1))
    # A cache is no part of checkpoints.
    return {**held.state_dict(), **dict(held.named_buffers())}


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    steps = []
    for case in CASES:
        own = slice(rank * case.batch, (rank + 1) * case.batch)
        done = step(case, network(), own)
        for gradient in done.gradients:
            # What DDP does to parameters; its import alone takes seconds.
            dist.all_reduce(gradient)
            gradient /= RANKS
        steps.append(tuple(done))
    share = 12 // RANKS
    found = {
        "steps": steps,
        "gathers": gathers(rank),
        "state": state(slice(rank * share, (rank + 1) * share)),
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
