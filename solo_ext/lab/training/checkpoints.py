"""Writes the checkpoints from which a run continues, at the end of an epoch or within it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from solo_ext.config.schema import Checkpoint as Settings
from solo_ext.core.errors import ProcessLost, StoppedBySignal
from solo_ext.core.files import atomic_write
from solo_ext.lab.training.lightning_internals import (
    ignore_sigterm_of_rank_0,
    when_step_is_complete,
)
from solo_ext.lab.training.run_dir import PREVIOUS, checkpoints
from solo_ext.lab.training.signals import Agreement, StopSignals, requeue


class RunCheckpoint(Checkpoint):
    """Writes ``<stem>-ep=<epoch>.ckpt``, or ``<stem>-ep=<epoch>-step=<n>.ckpt`` within an epoch.

    The last epoch always gets a checkpoint. Files are written atomically; the previous checkpoint
    is kept as ``....ckpt.previous``. A signal that asks the run to end, or the loss of a data
    worker, leads to a checkpoint after the next optimiser step. If the run has one process, an
    error between two steps, for example in loading images, leads to one at once. A validation that
    is due after the step runs before the checkpoint is written, because a resumed run would not
    repeat it.

    Raises:
        StoppedBySignal: in training, after the checkpoint was written.
        ProcessLost: the same, after a data worker died.
        OSError: in training, if a checkpoint cannot be written; earlier ones are kept.
    """

    def __init__(self, run_dir: Path, stem: str, settings: Settings) -> None:
        self.run_dir, self.stem, self.settings = run_dir, stem, settings
        self.signals = StopSignals(
            "Ctrl-C: what is at hand is finished and saved first, which may take a while"
        )
        self._lost: str | None = None
        self._between_steps = False
        self._agreement = Agreement()
        self._saved_at = time.monotonic()

    def note_lost(self, what: str) -> None:
        """Makes the run end after the next optimiser step, because a data worker died."""
        self._lost = what

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            for torn in self.run_dir.glob(".*-ep=*.saving"):
                torn.unlink(missing_ok=True)
        self._saved_at = time.monotonic()
        self.signals.listen()
        ignore_sigterm_of_rank_0(trainer)
        # A checkpoint written before the method's own `on_train_batch_end` would lack one step of
        # its momentum networks and queues.
        when_step_is_complete(trainer, pl_module, lambda i: self._save_within_epoch(trainer, i))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Tidy up here too: a run that was killed between its last checkpoint and the removal of the
        # one before it has nothing left to train or to save when it is resumed.
        held = checkpoints(self.run_dir)
        if trainer.is_global_zero and held:
            self._rotate(held[-1].path)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.signals.leave()
        alone = trainer.world_size == 1
        if not (self._between_steps and alone and isinstance(exception, Exception)):
            return
        loader: Any = trainer.train_dataloader
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        # Save only if the method has trained on every batch that was fetched: a resumed run would
        # skip the others.
        if loader.state_dict()["batches"] == done:
            # Report the first error even if saving fails too, for example on a full disk.
            with contextlib.suppress(Exception):
                self._save(trainer, f"-step={trainer.global_step}")

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._between_steps = False

    def _save_within_epoch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not stepped or batch_idx + 1 >= trainer.num_training_batches:
            return
        received, lost, due = self._agreed(trainer)
        steps = self.settings.every_n_steps
        every = steps and trainer.global_step % steps == 0
        if every or due or lost or received:
            self._save(trainer, f"-step={trainer.global_step}")
        else:
            self._between_steps = True
        self._stop_for(trainer, received, lost)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reached = 0 <= trainer.max_steps <= trainer.global_step
        # An epoch that max_time or max_steps cut short ends here too.
        whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        last = trainer.current_epoch + 1 == trainer.max_epochs
        final = reached or trainer.should_stop or last
        received, lost, due = self._agreed(trainer, now=True)
        if final or received or lost or due or trainer.current_epoch % self.settings.frequency == 0:
            self._save(trainer, "" if whole else f"-step={trainer.global_step}")
        if not final:
            self._stop_for(trainer, received, lost)

    def _agreed(self, trainer: pl.Trainer, *, now: bool = False) -> list[int]:
        """What all processes agree on: signal received (or 0), worker lost, checkpoint due."""
        waited = time.monotonic() - self._saved_at
        due = 0 < 60 * self.settings.every_n_minutes <= waited
        flags = [
            self.signals.received or 0,
            int(self._lost is not None),
            int(due and trainer.is_global_zero),
        ]
        device = trainer.strategy.root_device
        return self._agreement.any_of(flags, trainer.global_step, device, now=now)

    def _stop_for(self, trainer: pl.Trainer, received: int, lost: int) -> None:
        if not received and not lost:
            return
        again = received and trainer.is_global_zero and requeue(signal.Signals(received))
        # Launchers kill the other ranks once one has exited, so all wait here until rank 0 is done.
        trainer.strategy.barrier("stopped")
        command = f"`solo-ext pretrain --resume {self.run_dir}` goes on"
        then = "the job is requeued" if again else command
        if not received:
            what = self._lost or "another process of this run lost a data worker"
            raise ProcessLost(
                f"{what}; optimiser step {trainer.global_step} is saved; {command}; a smaller "
                "data.num_workers needs less memory"
            )
        raise StoppedBySignal(
            f"stopped by {signal.Signals(received).name} after optimiser step "
            f"{trainer.global_step}, which is saved; {then}",
            received,
        )

    def _save(self, trainer: pl.Trainer, place: str) -> None:
        target = self.run_dir / f"{self.stem}-ep={trainer.current_epoch}{place}.ckpt"
        if trainer.is_global_zero:
            atomic_write(target, trainer.save_checkpoint)
            self._rotate(target)
        else:
            # Every rank calls this: Lightning collects the state of all, and writes on rank 0 only.
            trainer.save_checkpoint(target)
        self._saved_at = time.monotonic()
        self._between_steps = False

    def _rotate(self, newest: Path) -> None:
        """Marks the checkpoint before ``newest`` as previous, and deletes those before that."""
        # List the folder, because a killed process may have left more than one.
        keep = self.settings.keep_prev
        others = [
            held.path
            for held in checkpoints(self.run_dir)
            if held.path != newest and (held.step is not None or not keep)
        ]
        if not others:
            return
        *older, last = others
        for path in (*self.run_dir.glob(f"*.ckpt{PREVIOUS}"), *older):
            path.unlink(missing_ok=True)
        os.replace(last, last.with_name(last.name + PREVIOUS))
