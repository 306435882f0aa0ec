"""Checkpoints that continue the same run, at the end of an epoch or within it."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from solo_ext.core.errors import OF_TORCH, ProcessLost, StoppedBySignal, UserError
from solo_ext.lab.training.agreement import Agreement
from solo_ext.lab.training.requeue import requeue
from solo_ext.lab.training.run_dir import checkpoints, outdate
from solo_ext.lab.training.stop_signals import StopSignals


class RunCheckpoint(Checkpoint):
    """Writes ``<stem>-ep=<epoch>.ckpt``, and ``-step=<n>`` within an epoch.

    A file appears whole or not at all; the one before it is kept as ``....ckpt.previous``. A
    signal that asks the run to end, and the loss of a data worker, are answered after the next
    optimiser step, with a checkpoint. A validation that is due after the step comes first, for a
    resumed run does not repeat it.

    Args:
        run_dir: the run directory.
        stem: first part of the names.
        frequency: epochs between checkpoints; the last epoch always has one.
        keep_prev: keep those of earlier epochs.
        every_n_steps: optimiser steps between checkpoints within an epoch; 0 is none.
        every_n_minutes: minutes from one checkpoint to the next, at most; 0 is none.

    Raises:
        StoppedBySignal: in training, once the checkpoint is there.
        ProcessLost: likewise.
        UserError: in training, a checkpoint that cannot be written; those before it are kept.
    """

    def __init__(
        self,
        run_dir: Path,
        stem: str,
        *,
        frequency: int,
        keep_prev: bool,
        every_n_steps: int,
        every_n_minutes: float,
    ) -> None:
        self.run_dir, self.stem = run_dir, stem
        self.frequency, self.keep_prev = frequency, keep_prev
        self.every_n_steps, self.every_n_minutes = every_n_steps, every_n_minutes
        self.signals = StopSignals(
            "Ctrl-C: what is at hand is finished and saved first, which may take a while"
        )
        self._lost: str | None = None
        self._agreement: Agreement | None = None
        self._saved_at = time.monotonic()
        self._validates_first = False

    def note_lost(self, what: str) -> None:
        """What a loader calls that lost a worker.

        Args:
            what: happened.
        """
        self._lost = what

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for torn in (
            self.run_dir.glob(f".{glob.escape(self.stem)}-ep=*.saving")
            if trainer.is_global_zero
            else ()
        ):
            torn.unlink(missing_ok=True)
        self._agreement = Agreement(pl_module.device)
        self._saved_at = time.monotonic()
        self.signals.listen()
        # Before every batch Lightning would ask the first process whether it received SIGTERM, and
        # wait for the device to answer; signals are agreed on here.
        trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
        # Lightning calls callbacks before the method's own hook, which moves momentum networks
        # and queues: a checkpoint written in between would lose one step of them.
        own = pl_module.on_train_batch_end

        def own_then_save(outputs: Any, batch: Any, batch_idx: int) -> None:
            own(outputs, batch, batch_idx)
            self._validates_first = _validates_next(trainer)
            if not self._validates_first:
                self._save_within_epoch(trainer, batch_idx)

        pl_module.on_train_batch_end = own_then_save  # type: ignore[method-assign]
        # Not in a hook of validation, where metrics and the stage are those of validation.
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        validate = loop.val_loop.run

        def validate_then_save() -> Any:
            first_loop_iter = connector._first_loop_iter
            found = validate()
            if self._validates_first:
                self._validates_first = False
                # As Lightning does next.
                trainer.training, connector._first_loop_iter = True, first_loop_iter
                self._save_within_epoch(trainer, loop.batch_idx)
            return found

        loop.val_loop.__dict__["run"] = validate_then_save

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.__dict__.pop("on_train_batch_end", None)
        trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        trainer.fit_loop.epoch_loop.val_loop.__dict__.pop("run", None)
        self.signals.leave()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)

    def _save_within_epoch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not stepped or batch_idx + 1 >= trainer.num_training_batches:
            return
        received, lost, due = self._agreed(trainer)
        every = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if every or due or lost or received:
            self._save(trainer, f"-step={trainer.global_step}")
        self._stop_for(trainer, received, lost)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reached = 0 <= trainer.max_steps <= trainer.global_step
        # An epoch that max_time or max_steps cut short ends here too.
        whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        final = reached or trainer.should_stop or _last_epoch(trainer)
        received, lost, due = self._agreed(trainer, now=True)
        if final or received or lost or due or trainer.current_epoch % self.frequency == 0:
            self._save(trainer, "" if whole else f"-step={trainer.global_step}")
        if not final:
            self._stop_for(trainer, received, lost)

    def _agreed(self, trainer: pl.Trainer, *, now: bool = False) -> list[int]:
        """The signal that any process received, whether one lost a worker, and the clock's say."""
        assert self._agreement is not None
        waited = time.monotonic() - self._saved_at
        due = 0 < 60 * self.every_n_minutes <= waited
        wishes = [
            self.signals.received or 0,
            int(self._lost is not None),
            int(due and trainer.is_global_zero),
        ]
        return self._agreement.any_of(wishes, trainer.global_step, now=now)

    def _stop_for(self, trainer: pl.Trainer, received: int, lost: int) -> None:
        if not received and not lost:
            return
        again = received and trainer.is_global_zero and requeue(signal.Signals(received))
        # Launchers kill the others once one process has ended: none does before the first is done.
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
        scratch = self.run_dir / f".{target.name}.saving"
        try:
            trainer.save_checkpoint(scratch)
            if trainer.is_global_zero:
                _sync(scratch)
                os.replace(scratch, target)
                _sync(self.run_dir)
                self._outdate_others(target)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            if not isinstance(error, OSError) and not OF_TORCH.search(str(error)):
                raise
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            remedy = "give it permission to write" if _is_denied(reason) else "make room"
            raise UserError(
                f"checkpoint {str(target)!r} cannot be written ({reason}); those before it are "
                f"kept: {remedy}, then `solo-ext pretrain --resume {self.run_dir}` goes on"
            ) from error
        self._saved_at = time.monotonic()

    def _outdate_others(self, newest: Path) -> None:
        """By what is there: a process that was killed may have left more than one."""
        others = [
            held
            for held in checkpoints(self.run_dir)
            if held.path.name.startswith(f"{self.stem}-ep=") and held.path != newest
        ]
        outdate(self.run_dir, [h for h in others if h.step is not None or not self.keep_prev])


def _is_denied(reason: str) -> bool:
    """By the words of the system, which torch's own errors quote."""
    return any(os.strerror(code) in reason for code in (errno.EACCES, errno.EPERM, errno.EROFS))


def _last_epoch(trainer: pl.Trainer) -> bool:
    # Without a number of epochs, -1, the steps decide.
    return trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1


def _validates_next(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates after this batch, and would not in a run resumed from here."""
    by_clock = getattr(trainer, "_val_check_time_interval", None) is not None
    if by_clock or (trainer.should_stop and trainer.fit_loop._can_stop_early):
        # The clock starts again with the run; and a run that is to stop is saved at its end.
        return False
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def _sync(path: Path) -> None:
    """Makes the disk hold what the file or folder says."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
