"""A run of PCL that Lightning starts once per process, for ``test_pcl_distributed.py``.

python pcl_run.py FOLDER key=value ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.config.compose import compose
from solo_ext.core import distributed
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.memory.features import FeatureBank
from solo_ext.memory.state import keep_out_of_broadcast

BATCH = 40


def fixed(dim: int, size: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Queries, keys and sample indices of a whole batch, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, BATCH, dim, generator=generator)
    keys = torch.nn.functional.normalize(z[2:], dim=2)
    return list(z[:2]), list(keys), torch.randperm(size, generator=generator)[:BATCH]


def loss_of_fixed_features(method: Any) -> dict[str, Any]:
    """The loss on this rank's part of a batch, averaged over ranks as DDP would."""
    count = distributed.total(method.prototypes.assignments.shape[1], method.device)
    queries, keys, indices = fixed(128, count)
    world, rank = distributed.world_size(), distributed.rank()
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    mine = [q[own].clone().requires_grad_() for q in queries]
    loss, _ = method.contrast(mine, [k[own] for k in keys], indices[own])
    gradients = torch.autograd.grad(loss, mine)
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    return {"loss": loss / world, "gradients": [g / world for g in gradients]}


class Notes(Callback):
    """Saves what this rank holds at the first batch of every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, []

    def setup(self, trainer: Any, method: Any, stage: str) -> None:
        # A bank whose rows differ between ranks, which a broadcast would make alike.
        method.probe = FeatureBank(1)
        method.probe.resize_(2 * trainer.world_size)
        keep_out_of_broadcast(method)

    def on_train_start(self, trainer: Any, method: Any) -> None:
        method.probe.value.fill_(1 + trainer.global_rank)

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            return
        networks = method.momentum_backbone, method.momentum_projector
        self.seen.append(
            {
                "epoch": method.prototypes.epoch,
                "assignments": method.prototypes.assignments.clone(),
                "means": [m.clone() for m in method.prototypes.means],
                "weights": [{k: v.clone() for k, v in n.state_dict().items()} for n in networks],
                "fixed": loss_of_fixed_features(method),
            }
        )

    def on_train_batch_end(
        self, trainer: Any, method: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen[-1].setdefault("lots", []).append(method.draw_seed(batch_idx))

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.seen[-1]["probe"] = method.probe.value.clone()
        torch.save(self.seen, self.folder / f"rank-{trainer.global_rank}.pt")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    notes = Notes(folder)
    pretrain(
        prepare(compose("digits/pcl", sys.argv[2:])),
        run_dir=folder / "run",
        callbacks=[notes],
        show_progress=False,
    )
