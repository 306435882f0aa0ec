"""Checkpoints that continue the same run, at the end of an epoch or within it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from solo_ext.data.place import Resumable
from solo_ext.training.run_dir import checkpoints


class RunState(Callback):
    """Keeps the place in the data and the random generators in the checkpoint.

    Lightning restores a loader's place only within an epoch; after one it would draw the next
    epoch in the order of the first.

    Args:
        loader: the training loader.
    """

    def __init__(self, loader: Resumable) -> None:
        self.loader = loader
        self._pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        version, keys, gauss = random.getstate()
        name, words, place, has_gauss, cached = cast(
            Any,
            np.random.get_state(legacy=True),  # noqa: NPY002 (others may draw from it)
        )
        return {
            "data": self.loader.state_dict(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": (version, list(keys), gauss),
            "numpy": (
                str(name),
                torch.from_numpy(words.astype(np.int64)),
                place,
                has_gauss,
                cached,
            ),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict["data"])
        self._pending = state_dict

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A run resumed within an epoch starts no epoch.
        self._restore()

    def _restore(self) -> None:
        """Late, because a method's own start of training may draw numbers."""
        state, self._pending = self._pending, None
        if state is None:
            return
        torch.set_rng_state(state["torch"].cpu())
        if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
        name, words, place, has_gauss, cached = state["numpy"]
        words = words.numpy().astype(np.uint32)
        np.random.set_state((name, words, place, has_gauss, cached))  # noqa: NPY002


class RunCheckpoint(Checkpoint):
    """Writes ``<stem>-ep=<epoch>.ckpt``, and ``-step=<n>`` within an epoch.

    A file appears whole or not at all; the one before it goes once the new one is there.

    Args:
        run_dir: the run directory.
        stem: first part of the names.
        frequency: epochs between checkpoints; the last epoch always has one.
        keep_prev: keep those of earlier epochs.
        every_n_steps: optimiser steps between checkpoints within an epoch; 0 is none.
    """

    def __init__(
        self, run_dir: Path, stem: str, *, frequency: int, keep_prev: bool, every_n_steps: int
    ) -> None:
        self.run_dir, self.stem = run_dir, stem
        self.frequency, self.keep_prev, self.every_n_steps = frequency, keep_prev, every_n_steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for torn in (
            self.run_dir.glob(f".{self.stem}-ep=*.saving") if trainer.is_global_zero else ()
        ):
            torn.unlink(missing_ok=True)
        if not self.every_n_steps:
            return
        # Lightning calls callbacks before the method's own hook, which moves momentum networks
        # and queues: a checkpoint written in between would lose one step of them.
        own = pl_module.on_train_batch_end

        def own_then_save(outputs: Any, batch: Any, batch_idx: int) -> None:
            own(outputs, batch, batch_idx)
            self._save_within_epoch(trainer, batch_idx)

        pl_module.on_train_batch_end = own_then_save  # type: ignore[method-assign]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.__dict__.pop("on_train_batch_end", None)

    def _save_within_epoch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        last = batch_idx + 1 >= trainer.num_training_batches
        if stepped and not last and trainer.global_step % self.every_n_steps == 0:
            self._save(trainer, f"-step={trainer.global_step}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        final = trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
        if final or trainer.current_epoch % self.frequency == 0:
            self._save(trainer, "")

    def _save(self, trainer: pl.Trainer, place: str) -> None:
        target = self.run_dir / f"{self.stem}-ep={trainer.current_epoch}{place}.ckpt"
        scratch = self.run_dir / f".{target.name}.saving"
        trainer.save_checkpoint(scratch)
        if trainer.is_global_zero:
            _sync(scratch)
            os.replace(scratch, target)
            _sync(self.run_dir)
            self._remove_outdated(target)

    def _remove_outdated(self, newest: Path) -> None:
        """By what is there: a process that was killed may have left more than one."""
        for held in checkpoints(self.run_dir):
            ours = held.path.name.startswith(f"{self.stem}-ep=") and held.path != newest
            if ours and (held.step is not None or not self.keep_prev):
                held.path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Makes the disk hold what the file or folder says."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
