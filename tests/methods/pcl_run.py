"""A run of PCL that Lightning starts once per process.

python pcl_run.py FOLDER [failing] key=value ...

Failing, the second of the processes cannot embed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.config.compose import compose
from solo_ext.core import distributed
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.memory.features import FeatureBank
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods import PCL
from solo_ext.methods.e_step import EStep

FAILING = "failing"


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
            }
        )

    def on_train_batch_end(
        self, trainer: Any, method: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen[-1].setdefault("lots", []).append(method.step_draws.seed)

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.seen[-1]["probe"] = method.probe.value.clone()
        torch.save(self.seen, self.folder / f"rank-{trainer.global_rank}.pt")


def embed_or_fail(method: PCL, X: Tensor) -> Tensor:
    """Stands in for a second process whose device has no memory left."""
    if distributed.rank() == 1:
        raise torch.OutOfMemoryError("of 9 GiB")
    z: Tensor = method.momentum_projector(method.momentum_forward(X)["feats"])
    return z


def noted(*args: Any) -> dict[str, float]:
    """Writes down the error of each process, and when."""
    try:
        return run(*args)
    except Exception as error:
        text = f"{type(error).__name__}: {error} at {time.time()}"
        (folder / f"rank-{distributed.rank()}.txt").write_text(text)
        raise


if __name__ == "__main__":
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    callbacks: list[Callback] = [Notes(folder)]
    if words[0] == FAILING:
        run, callbacks = EStep.run, []
        EStep.run = noted  # type: ignore[method-assign]
        PCL.embed = embed_or_fail  # type: ignore[method-assign]
        del words[0]
    pretrain(
        prepare(compose("digits/pcl", words)),
        run_dir=folder / "run",
        callbacks=callbacks,
        show_progress=False,
    )
