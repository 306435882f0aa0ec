"""How long the epochs of a run train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from solo_ext.core.files import append_lines, read_jsonl

EPOCHS = "epochs.jsonl"


class EpochTimes(Callback):
    """Writes a line for every epoch: its number from 0, its images, its seconds of training.

    From the start of the epoch, an E-step included, to its last batch: validation, evaluation and
    checkpoints come after it. An epoch that a killed run repeats has a second line, which counts.

    Args:
        file: the file.
        batch_size: of one process.
    """

    def __init__(self, file: Path, batch_size: int) -> None:
        self.file, self.batch_size = file, batch_size
        self._begin = self._end = 0.0
        self._batches = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = self._end = time.monotonic()
        self._batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self._end = time.monotonic()
        self._batches += 1

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        line = {
            "epoch": trainer.current_epoch,
            "images": self._batches * self.batch_size * trainer.world_size,
            "seconds": round(self._end - self._begin, 4),
        }
        append_lines(self.file, [line])


def read_epochs(file: Path) -> list[dict[str, Any]]:
    """One entry for each finished epoch, in order; none where there is no file."""
    found = {entry["epoch"]: entry for entry in read_jsonl(file) if "epoch" in entry}
    return [found[epoch] for epoch in sorted(found)]
