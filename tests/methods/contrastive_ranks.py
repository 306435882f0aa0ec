"""Losses of given features in several processes, for ``test_contrastive_distributed.py``."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.losses.contrastive import Mixing
from solo_ext.losses.mochi import draw_mixes
from solo_ext.methods import PCL, Metric, negatives
from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.registry import example_config

RANKS = int(os.environ.get("RANKS", "2"))
CONTRASTIVE = Preset(ContrastiveKwargs)
ROWS, SAMPLES, DIM = 12, 20, 8
MIXES = {"num_hard": 5, "num_pair_mixes": 6, "num_query_mixes": 3, "warmup_epochs": 0}
HARD = {"temperature": 0.5, "tau_plus": 0.1, "beta": 1.0}
QUEUE = {"negatives": "queue", "queue_size": 30}
NEAR = {"positives": "nearest_neighbor", "support_set": {"size": 30, "top_k": 2}}
PROTOTYPES = {
    "positives": "prototype",
    "clusters": {"num_prototypes": [3, 4], "warmup_epochs": 0},
}
MARGIN = {"loss": "arcface_loss_func", "loss_kwargs": {"scale": 8.0}}
FIXED: dict[str, tuple[Any, dict[str, Any]]] = {
    "simclr": (CONTRASTIVE, {}),
    "debiased": (CONTRASTIVE, {"temperature": 0.5, "tau_plus": 0.1}),
    "mixed": (CONTRASTIVE, {**HARD, "mixing": {**MIXES, "num_hard": 1024}}),
    "prototypes": (CONTRASTIVE, {**HARD, **PROTOTYPES}),
    "queue": (CONTRASTIVE, {**HARD, **QUEUE}),
    "mochi": (CONTRASTIVE, {**QUEUE, "mixing": MIXES}),
    "mochi of others": (CONTRASTIVE, {**HARD, **QUEUE, "exclude_own": True, "mixing": MIXES}),
    "nnclr": (CONTRASTIVE, NEAR),
    "one-way": (CONTRASTIVE, {**HARD, **NEAR, "symmetric": False}),
    "mixed neighbours": (CONTRASTIVE, {**NEAR, "mixing": {**MIXES, "num_hard": 1024}}),
    "near and queue": (CONTRASTIVE, {**HARD, **NEAR, **QUEUE}),
    **{
        f"triplet {m}": (Metric, {"loss": "triplet_loss_func", "mining": m, "classes": "label"})
        for m in ("semi_hard", "hard", "random")
    },
    **{
        name: (Metric, {"loss": f"{name}_loss_func"})
        for name in ("nt_xent", "n_pair", "clip", "nce", "bilinear_info_nce", "uniformity")
    },
    **{
        name: (Metric, {"loss": f"{name}_loss_func", "classes": "label"})
        for name in ("soft_nearest_neighbor", "lifted_structured", "contrastive")
    },
    "arcface": (Metric, {**MARGIN, "classes": "label"}),
    "of another package": (Metric, {"loss": "pml/NTXentLoss", "classes": "label"}),
    "pcl": (PCL, {"num_prototypes": [3, 4], "queue_size": 30, "symmetric": True}),
    "clusters": (Metric, {**MARGIN, "classes": "cluster", "clusters": {"num_prototypes": [3]}}),
}
"""Methods whose loss is computed on given features."""


def same_draws(anchors: Tensor, num_hard: int, *counts: Any) -> Any:
    """For every anchor the same, so that its row and process do not matter."""
    generator = torch.Generator().manual_seed(num_hard)
    pairs, singles, _ = counts
    one = draw_mixes(anchors[:1], num_hard, pairs, singles, generator)
    return type(one)(*(x.expand(len(anchors), *x.shape[1:]).contiguous() for x in one))


def from_the_hardest_down(num_hard: int, draws: Any, ranked: bool) -> Mixing:
    """The order of the mined rows is that of neither process."""
    return Mixing(num_hard, draws)


def fix_draws(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes mixtures the same for every anchor, in whichever process it is."""
    put(negatives, "draw_mixes", same_draws)
    put(negatives, "Mixing", from_the_hardest_down)


def fill_prototypes(method: Any) -> None:
    """Random prototypes of 20 samples, as an E-step leaves them."""
    state = method.prototypes
    if not state.num_prototypes:
        return
    means = [torch.randn(k, DIM) for k in state.num_prototypes]
    drawn = [torch.randint(0, k, (SAMPLES,)) for k in state.num_prototypes]
    assignments = [distributed.share_of(whole) for whole in drawn]
    concentration = [0.1 + torch.rand(k) for k in state.num_prototypes]
    state.update_(0, means, concentration, assignments)


def built(cfg: Any, kind: Any, kwargs: dict[str, Any]) -> Any:
    """A method of 8 dimensions with given clusters."""
    own = copy.deepcopy(cfg)
    own.method_kwargs = {"proj_hidden_dim": 16, "proj_output_dim": DIM, **kwargs}
    if kind is PCL:
        # It takes no small crops.
        own.data.num_small_crops = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = kind(own)
        fill_prototypes(method)
        for queue in getattr(method, "queues", ()):
            if hasattr(queue, "indices"):
                queue.indices.random_(0, SAMPLES)
    return method


def loss_of_fixed_features(method: Any) -> dict[str, Any]:
    """The loss on this rank's part of a batch, averaged over ranks as DDP would."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, DIM, generator=generator)
    views = images + torch.randn(3, ROWS, DIM, generator=generator)
    keys = F.normalize(images + 0.3 * torch.randn(2, ROWS, DIM, generator=generator), dim=2)
    indices = torch.randperm(SAMPLES, generator=generator)[:ROWS]
    # Of unequal numbers of images, and not the same classes on both ranks.
    targets = torch.tensor([0, 1, 2, 0, 0, 1, 1, 0, 2, 1, 1, 1])
    world, rank = distributed.world_size(), distributed.rank()
    own = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    mine = [view[own].clone().requires_grad_() for view in views]
    local, learnt = [key[own] for key in keys], []
    if isinstance(method, Metric):
        loss, _ = method.compare(mine, indices[own], targets[own])
        learnt = [p for p in method.criterion.parameters() if p.requires_grad]
    elif isinstance(method, PCL):
        mine = mine[:2]
        loss, _ = method.contrast(mine, local, indices[own])
    else:
        loss, _ = method.contrast(mine, local, indices[own], targets[own])
    gradients = torch.autograd.grad(loss, [*mine, *learnt])
    shared = [loss.detach(), *gradients[len(mine) :]]
    for value in shared if world > 1 else ():
        dist.all_reduce(value)
    return {
        "loss": shared[0] / world,
        "weights": [g / world for g in shared[1:]],
        "gradients": [g / world for g in gradients[: len(mine)]],
    }


def losses() -> dict[str, Any]:
    """Of every method, this rank's part."""
    cfg = example_config("debiased", small=1)
    return {
        name: loss_of_fixed_features(built(cfg, kind, kwargs))
        for name, (kind, kwargs) in FIXED.items()
    }


def run(rank: int, folder: str) -> None:
    """Saves them as one of the processes."""
    torch.set_num_threads(1)
    fix_draws()
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    torch.save(losses(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
