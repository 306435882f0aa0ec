"""What each of several gloo processes computes for ``test_distributed.py``.

A module of its own, of which each process runs ``run``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext import losses
from solo_ext.core import distributed
from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.contrastive import (
    PLAIN,
    Mixing,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    two_view_terms,
)
from solo_ext.losses.mochi import draw_mixes
from solo_ext.losses.nnclr import nnclr_terms
from solo_ext.memory import PrototypePrior, sinkhorn
from solo_ext.memory.features import FeatureBank, FeatureQueue, SupportSet
from solo_ext.memory.heads import ClassWeights

RANKS = int(os.environ.get("RANKS", "2"))
IMAGES, VIEWS, CLASSES, D, K = 12, 3, 7, 5, 11
HARD = NegativeEstimator(0.1, 0.5)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Model(nn.Module):
    """An fp64 network and what learns in the losses, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, D))
        self.critic = nn.ParameterDict({"weight": torch.empty(D, D).normal_(std=1 / D)})
        self.head = ClassWeights(CLASSES, D)
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.prototypes = nn.Parameter(F.normalize(torch.randn(K, D), dim=1))
        self.double()


class Given(NamedTuple):
    """What a process holds of a batch."""

    model: Model
    views: list[Tensor]
    """(N, 5) each."""
    targets: Tensor
    images: int
    """Of all processes."""
    own: slice
    """Those of this process."""

    def mixing(self, views: int) -> Mixing:
        """Its part of the draws for the anchors of the first views."""
        anchors = torch.empty(VIEWS * self.images, D, dtype=torch.float64)
        hard = min(3, self.images - 1)
        draws = draw_mixes(anchors, hard, 4, 2, torch.Generator().manual_seed(0))
        every = (x.unflatten(0, (VIEWS, self.images))[:views, self.own] for x in draws)
        return Mixing(hard, MixDraws(*(x.flatten(0, 1) for x in every)))


Found = tuple[Tensor, Tensor]
"""Loss, and another value whose mean over processes is that of one."""
Loss = Callable[[Given, float], Tensor | Found]


def pair(estimator: NegativeEstimator) -> Loss:
    def loss(g: Given, t: float) -> Found:
        terms = two_view_terms(*g.views[:2], t, estimator)
        return terms.loss, terms.clamped

    return loss


def of_views(estimator: NegativeEstimator, mixes: bool = False) -> Loss:
    def loss(g: Given, t: float) -> Found:
        batch, mixing = batch_of_views(g.views)._asdict(), g.mixing(VIEWS) if mixes else None
        terms = contrastive(**batch, estimator=estimator, mixing=mixing, temperature=t)
        return terms.loss, terms.clamped

    return loss


def nnclr(symmetric: bool, estimator: NegativeEstimator = PLAIN, mixes: bool = False) -> Loss:
    def loss(g: Given, t: float) -> Found:
        mixing = g.mixing(1) if mixes else None
        found, rows = nnclr_terms(*g.views[:2], t, symmetric, estimator, mixing)
        return found, rows.clamped

    return loss


def mochi(g: Given, t: float) -> Tensor:
    mixing, queue = g.mixing(1), F.normalize(normal(12, D, seed=5), dim=1)
    return losses.mochi_loss_func(*g.views[:2], queue, t, mixing.num_hard, draws=mixing.draws)


def protocpc(**options: Any) -> Loss:
    def loss(g: Given, _: float) -> Found:
        teacher, prior = normal(2, g.images, D, seed=3)[:, g.own], normal(K, seed=4).abs() + 0.1
        student, prior = torch.stack(g.views), K * prior / prior.sum()
        terms = losses.protocpc_step(student, teacher, g.model.prototypes, prior, **options)
        return terms.loss, terms.prior

    return loss


IN_BATCH: dict[str, Loss] = {
    "nt_xent": lambda g, t: losses.nt_xent_loss_func(*g.views[:2], t),
    "debiased": pair(NegativeEstimator(0.1)),
    "hard": pair(NegativeEstimator(0.1, 1.0)),
    "hard, detached": pair(NegativeEstimator(0.1, 1.0, True)),
    "three views": of_views(PLAIN),
    "three views, hard": of_views(HARD),
    "three views, mixed": of_views(HARD, mixes=True),
    "nnclr": nnclr(symmetric=True),
    "nnclr, row": nnclr(symmetric=False),
    "nnclr, hard": nnclr(symmetric=True, estimator=HARD),
    "nnclr, mixed": nnclr(symmetric=True, mixes=True),
    "mochi": mochi,
}
OTHERS: dict[str, Loss] = {
    "alignment": lambda g, _: losses.alignment_loss_func(*g.views[:2], 1.5),
    "arcface": lambda g, _: losses.arcface_loss_func(g.model.head(g.views[0]), g.targets),
    "bilinear": lambda g, t: losses.bilinear_info_nce_loss_func(
        *g.views[:2], g.model.critic.weight, t
    ),
    "bilinear, of steps": lambda g, t: losses.bilinear_info_nce_loss_func(
        g.views[0],
        torch.stack(list(g.views[1:3])),
        torch.stack([g.model.critic.weight, g.model.critic.weight.T]),
        t,
    ),
    "clip": lambda g, _: losses.clip_loss_func(*g.views[:2], g.model.scale),
    "contrastive": lambda g, _: losses.contrastive_loss_func(*g.views[:2], g.targets % 2 == 0),
    "n_pair": lambda g, _: losses.n_pair_loss_func(*g.views[:2], 0.3),
    "nce": lambda g, _: losses.nce_loss_func(g.model.scale * g.views[0][:, 0], g.views[1]),
    "triplet": lambda g, _: losses.triplet_loss_func(*g.views),
    "uniformity": lambda g, _: losses.uniformity_loss_func(g.views[0], 1.0),
    "protocpc": protocpc(),
    "protocpc, cold": protocpc(teacher_temperature=0.01),
    "protocpc, softmax": protocpc(assignment="softmax"),
    "protocpc, after": protocpc(prior_order="after_loss"),
    "ce": protocpc(loss="ce", targets=torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])),
}
BY_LABEL: dict[str, Loss] = {
    "lifted": lambda g, _: losses.lifted_structured_loss_func(g.views[0], g.targets),
    "lifted max": lambda g, _: losses.lifted_structured_loss_func(
        g.views[0], g.targets, smooth=False
    ),
    "soft nearest": lambda g, _: losses.soft_nearest_neighbor_loss_func(g.views[0], g.targets, 0.7),
    "soft nearest cosine": lambda g, _: losses.soft_nearest_neighbor_loss_func(
        g.views[0], g.targets, 0.3, "cosine"
    ),
}
LOSSES = IN_BATCH | OTHERS | BY_LABEL
TARGETS: dict[str, list[int]] = {
    "mixed": [0, 1, 0, 2, 1, 2, 0, 1, 0, 2, 1, 2],
    "uneven": [0, 0, 0, 0, 1, 2, 3, 4, 5, 1, 6, 2],
    "positives on one rank only": [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    "positives across ranks only": [0, 1, 2, 3, 4, 5, 5, 4, 3, 6, 7, 8],
    "no positives": list(range(IMAGES)),
    "no negatives": [0] * IMAGES,
}


class Case(NamedTuple):
    """A loss on a batch."""

    loss: str
    temperature: float = 0.5
    single: bool = False
    """Whether each process has one image."""
    labels: str = "mixed"


CASES = [
    *(Case(n, t, s) for n in IN_BATCH for t in (0.1, 0.5) for s in (False, True)),
    *map(Case, OTHERS),
    *(Case(name, labels=labels) for name in BY_LABEL for labels in TARGETS),
]


class Step(NamedTuple):
    """What one process, or the only one, gets."""

    loss: Tensor
    note: Tensor
    gradients: list[Tensor]


def step(case: Case, rank: int | None = None) -> Step:
    """Forward and backward pass on a rank's part of the batch, or on all of it."""
    images = RANKS if case.single else IMAGES
    share, model = images // RANKS, Model()
    own = slice(None) if rank is None else slice(rank * share, (rank + 1) * share)
    inputs = normal(1, images, 6, seed=1) + normal(VIEWS, images, 6, seed=2)
    views = model.network(inputs[:, own].flatten(0, 1)).chunk(VIEWS)
    targets = torch.tensor(TARGETS[case.labels])[:images][own]
    found = LOSSES[case.loss](Given(model, list(views), targets, images, own), case.temperature)
    loss, note = found if isinstance(found, tuple) else (found, torch.zeros(()))
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return Step(loss.detach(), note.detach(), gradients)


def weights(rank: int) -> Tensor:
    """(2 * ranks, 3) weights of a rank's own loss."""
    return torch.arange(6.0 * RANKS).view(-1, 3) * (rank + 1) + 0.5


def gathers(rank: int) -> dict[str, Tensor]:
    """Gathers tensors of several kinds, with and without gradient."""
    own = torch.arange(6.0).view(2, 3) + 100 * rank
    x, bias = own.clone().requires_grad_(), torch.ones(2 * RANKS, 3, requires_grad=True)
    joined = distributed.gather_with_gradient(x)
    # The gradient of a sum is one tensor, which both of its terms receive.
    ((joined + 2 * bias) * weights(rank)).sum().backward()
    # An expanded, non-contiguous incoming gradient.
    expanded = own.clone().requires_grad_()
    distributed.gather_with_gradient(expanded).sum().mul(rank + 1).backward()
    found = {
        "plain": distributed.gather(own.clone().requires_grad_()),
        "transposed": distributed.gather(own.T),
        "integer": distributed.gather(torch.tensor([rank, 10 + rank])),
        "with gradient": joined.detach(),
        "gradient": x.grad,
        "gradient of bias": bias.grad,
        "gradient of sum": expanded.grad,
    }
    return {name: value for name, value in found.items() if value is not None}


def state(own: slice = slice(None)) -> dict[str, Tensor]:
    """Buffers of modules that take in the rows of all processes, two batches."""
    queue, support, bank = FeatureQueue(24, 3), SupportSet(24, 3), FeatureBank(3)
    bank.resize_(24)
    held = nn.ModuleDict({"queue": queue, "support": support, "bank": bank}).double()
    numbers = torch.randperm(24, generator=torch.Generator().manual_seed(7))
    for batch, rows in zip(numbers.view(2, 12), normal(2, 12, 3, seed=7), strict=True):
        part, ids = F.normalize(rows, dim=1)[own], batch[own]
        joined, all_ids = distributed.gather(part), distributed.gather(ids)
        queue.update_(joined)
        support.update_(joined, all_ids, all_ids % 3)
        bank.update_(all_ids, joined)
    return held.state_dict()


SPLITS = {
    "even": {2: (6, 6), 4: (3, 3, 3, 3)},
    "uneven": {2: (4, 8), 4: (5, 1, 3, 3)},
    "one": {2: (1, 11), 4: (1, 1, 9, 1)},
}
"""How many of the samples each process has."""
SCORES: dict[str, tuple[float, dict[str, Any]]] = {
    "bounded": (0.05, {"unit": True}),
    "shifted": (0.05, {}),
    "cold": (0.01, {"iterations": 7}),
}


def parts(split: str) -> list[slice]:
    """The samples of each process."""
    ends = list(itertools.accumulate(SPLITS[split][RANKS]))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def cosines(own: slice) -> Tensor:
    """(N, K), whose largest entries lie in the second half of the batch."""
    rows, columns = (F.normalize(normal(n, D, seed=n), dim=1) for n in (IMAGES, K))
    scores = rows @ columns.T
    scores[:6] *= 0.3
    return scores[own]


def assigned(name: str, own: slice = slice(None)) -> Tensor:
    """Sinkhorn on a part of the batch."""
    epsilon, options = SCORES[name]
    return sinkhorn(cosines(own), epsilon, **options)


def prior(own: slice = slice(None)) -> Tensor:
    """A prior that has taken in a batch."""
    held = PrototypePrior(K, 0.7).double()
    held.update_((cosines(own) / 0.1).softmax(1))
    return held.value


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    steps = []
    for case in CASES:
        done = step(case, rank)
        # What DDP does to parameters; its import alone takes seconds.
        joined = torch.cat([gradient.flatten() for gradient in done.gradients])
        dist.all_reduce(joined)
        pieces = torch.split(joined / RANKS, [g.numel() for g in done.gradients])
        means = [piece.view_as(g) for piece, g in zip(pieces, done.gradients, strict=True)]
        steps.append(tuple(done._replace(gradients=means)))
    share = IMAGES // RANKS
    own = {split: parts(split)[rank] for split in SPLITS}
    found = {
        "steps": steps,
        "gathers": gathers(rank),
        "state": state(slice(rank * share, (rank + 1) * share)),
        "sinkhorn": {(s, n): assigned(n, part) for s, part in own.items() for n in SCORES},
        "prior": {s: prior(part) for s, part in own.items()},
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
