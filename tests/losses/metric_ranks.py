"""What each of several gloo processes computes for ``test_metric_distributed.py``.

A module of its own because a spawned process imports the function that it runs by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solo_ext import losses
from solo_ext.memory.heads import BilinearCritic, ClassWeights

RANKS, BATCH, CLASSES = int(os.environ.get("RANKS", "2")), 12, 7


class Model(nn.Module):
    """An fp64 network, a critic, class weights and a scale, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = BilinearCritic(4, 4)
        self.head = ClassWeights(CLASSES, 4)
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.double()


Loss = Callable[[Model, Tensor, Tensor, Tensor], Tensor]
"""Of the model, two (N, 4) batches of embeddings and (N,) labels."""

LOSSES: dict[str, Loss] = {
    "alignment": lambda _, x, y, __: losses.alignment_loss_func(x, y, 1.5),
    "arcface": lambda m, x, _, t: losses.arcface_loss_func(m.head(x), t),
    "bilinear": lambda m, x, y, _: losses.bilinear_info_nce_loss_func(x, y, m.critic.weight, 0.5),
    "clip": lambda m, x, y, _: losses.clip_loss_func(x, y, m.scale),
    "contrastive": lambda _, x, y, t: losses.contrastive_loss_func(x, y, t % 2 == 0),
    "cosface": lambda m, x, _, t: losses.cosface_loss_func(m.head(x), t),
    "lifted": lambda _, x, __, t: losses.lifted_structured_loss_func(x, t),
    "lifted max": lambda _, x, __, t: losses.lifted_structured_loss_func(x, t, smooth=False),
    "n_pair": lambda _, x, y, __: losses.n_pair_loss_func(x, y, 0.3),
    "nce": lambda m, x, y, _: losses.nce_loss_func(m.scale * x[:, 0], y),
    "soft nearest": lambda _, x, __, t: losses.soft_nearest_neighbor_loss_func(x, t, 0.7),
    "soft nearest cosine": lambda _, x, __, t: losses.soft_nearest_neighbor_loss_func(
        x, t, 0.3, "cosine"
    ),
    "sphereface": lambda m, x, _, t: losses.sphereface_loss_func(
        m.head(x), t, feature_norm=torch.linalg.vector_norm(x, dim=1)
    ),
    "triplet": lambda _, x, y, __: losses.triplet_loss_func(x, y, y.square()),
    "uniformity": lambda _, x, __, ___: losses.uniformity_loss_func(x, 1.0),
}

TARGETS: dict[str, list[int]] = {
    "mixed": [0, 1, 0, 2, 1, 2, 0, 1, 0, 2, 1, 2],
    "uneven": [0, 0, 0, 0, 1, 2, 3, 4, 5, 1, 6, 2],
    "positives on one rank only": [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    "positives across ranks only": [0, 1, 2, 3, 4, 5, 5, 4, 3, 6, 7, 8],
    "no positives": list(range(12)),
    "no negatives": [0] * 12,
}
BY_LABEL = ("lifted", "lifted max", "soft nearest", "soft nearest cosine")
CASES = [
    (name, targets) for name in LOSSES for targets in (TARGETS if name in BY_LABEL else ("mixed",))
]


class Step(NamedTuple):
    """What one process, or the only one, gets."""

    loss: Tensor
    gradients: list[Tensor]


def joined_batch(targets: str) -> tuple[Tensor, Tensor]:
    """Returns (2, 12, 6), two views of the whole batch, and (12,) labels."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(1, BATCH, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, BATCH, 6, generator=generator, dtype=torch.float64)
    return rows + noise, torch.tensor(TARGETS[targets])


def step(name: str, views: Tensor, targets: Tensor) -> Step:
    """Runs forward and backward on (2, N, 6)."""
    model = Model()
    x, y = model.network(views.flatten(0, 1)).chunk(2)
    loss = LOSSES[name](model, x, y, targets)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return Step(loss.detach(), gradients)


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    steps = []
    for name, kind in CASES:
        views, targets = joined_batch(kind)
        own = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
        done = step(name, views[:, own], targets[own])
        for gradient in done.gradients:
            # What DDP does to parameters; its import alone takes seconds.
            dist.all_reduce(gradient)
            gradient /= RANKS
        steps.append(tuple(done))
    torch.save({"steps": steps}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
