"""Runs with faults, and the runs that Lightning starts once per process.

python nonfinite_run.py FOLDER, which holds ``cases.json``: config and fault by name
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.core.errors import UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain


def weights(method: Any) -> list[Tensor]:
    """Those that an optimiser moves."""
    (optimizer,) = method.trainer.optimizers
    return [p for group in optimizer.param_groups for p in group["params"]]


def image(method: Any, batch: Any, loss: Tensor) -> Tensor:
    """The loss of a batch with an image that holds NaN."""
    return loss


def infinite(method: Any, batch: Any, loss: Tensor) -> Tensor:
    """An infinite loss whose gradients are finite."""
    return loss + float("inf")


def gradients(method: Any, batch: Any, loss: Tensor) -> Tensor:
    """A finite loss whose gradients are NaN: the root of nothing."""
    return loss + (0 * weights(method)[0]).sum().abs().sqrt()


def overflow(method: Any, batch: Any, loss: Tensor) -> Tensor:
    """A finite loss whose gradients are infinite."""
    weight = weights(method)[0]
    return loss + (weight - weight.detach()).sum() * 1e30 * 1e30


FAULTS: dict[str, Callable[..., Tensor]] = {
    "image": image,
    "infinite": infinite,
    "gradients": gradients,
    "overflow": overflow,
}


class Fault(Callback):
    """Spoils some batches of a run on one rank, and notes what they were.

    Attributes:
        indices: of the spoilt batches, by number of the batch.
        weights: all of them in the end.

    Args:
        kind: of ``FAULTS``.
        batches: which, from 0.
        rank: of the process, ``None`` for all.
    """

    def __init__(self, kind: str, batches: Sequence[int], rank: int | None = None) -> None:
        self.kind, self.batches, self.rank = kind, set(batches), rank
        self.indices: dict[int, list[int]] = {}
        self.weights = torch.empty(0)
        self._now = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = torch.cat([p.detach().flatten() for p in weights(pl_module)])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        step = pl_module.training_step

        def spoilt(batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = step(batch, batch_idx)
            return FAULTS[self.kind](pl_module, batch, loss) if self._now else loss

        pl_module.training_step = spoilt

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        ours = self.rank is None or self.rank == trainer.global_rank
        self._now = ours and number in self.batches
        if self._now:
            self.indices[number] = batch[0].tolist()
            if self.kind == "image":
                for crop in batch[1]:
                    crop[-1] = float("nan")


def main(folder: Path) -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        fault, error = Fault(**case["fault"]), None
        run_dir = folder / name
        try:
            prepared = prepare(case["config"])
            pretrain(prepared, run_dir=run_dir, callbacks=[fault], show_progress=False)
        except UserError as caught:
            error = str(caught)
        noted = {"error": error, "indices": fault.indices, "weights": fault.weights}
        torch.save(noted, folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
