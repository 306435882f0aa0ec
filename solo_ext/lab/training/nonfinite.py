"""Losses and gradients that are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import UserError
from solo_ext.lab.training.bad_batches import BadBatches, Batch
from solo_ext.lab.training.kept_state import BufferSnapshot
from solo_ext.lab.training.late_reading import AsyncHostCopy
from solo_ext.lab.training.run_dir import checkpoints

logger = logging.getLogger(__name__)
EVERY = 16
"""Batches between two looks where a look costs something."""
MOST_IN_A_ROW = 32
"""So many bad steps in a row are no bad luck: the weights or the data are spoilt."""
MOST_BEFORE_SAVING = 4
"""Likewise, just before the weights are to be saved in the place of good ones."""


class NonFiniteWatch(Callback):
    """Stops at, or leaves out, batches whose loss or gradients are not finite.

    A step only sets a flag on the device. The host looks at it every :data:`EVERY` batches, on a
    GPU through a copy that it does not wait for, on a CPU after every batch; and always before
    validation, at the end of an epoch and before a checkpoint is written, which therefore never
    holds the weights after a bad batch. Several processes look at the same batches, together.

    ``skip`` zeroes the gradients of the optimiser step and puts all buffers back to where they
    were before it, without a look. With a gradient scaler, whose first gradients are infinite as
    a matter of course, only losses count as bad.

    Args:
        run_dir: the run directory; :class:`BadBatches` writes there.
        images: the training images, by sample index.
        action: what to do.
        every: batches between two looks; by default as said above.

    Raises:
        UserError: in training, at a bad batch, at too many in a row, or at weights that are not
            finite.
    """

    def __init__(
        self,
        run_dir: Path,
        images: Any,
        action: Literal["stop", "skip"],
        every: int | None = None,
    ) -> None:
        self.run_dir, self.images, self.action, self.every = run_dir, images, action, every
        self._bad: Tensor | None = None
        self._kept: BufferSnapshot | None = None
        self._late = AsyncHostCopy()
        self._looks_every = EVERY
        self._batches = BadBatches(run_dir, images, 0)
        self._count = self._step = self._left_out = 0
        self._stepped = True
        self._bad_window: Tensor | None = None
        self._bad_gradients: Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = pl_module.device
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._kept = BufferSnapshot(pl_module) if self.action == "skip" else None
        alone_on_cpu = device.type == "cpu" and distributed.world_size() == 1
        self._looks_every = self.every or (1 if alone_on_cpu else EVERY)
        keep = 4 * (self._looks_every + trainer.accumulate_grad_batches)
        self._batches = BadBatches(self.run_dir, self.images, keep)
        self._late = AsyncHostCopy()
        # Lightning calls callbacks before the method's own hook, which writes queues and priors.
        own = pl_module.on_train_batch_end

        def own_then_watch(outputs: Any, batch: Any, batch_idx: int) -> None:
            own(outputs, batch, batch_idx)
            self._note(trainer, outputs, batch)

        pl_module.on_train_batch_end = own_then_watch  # type: ignore[method-assign]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.__dict__.pop("on_train_batch_end", None)
        self._bad = self._kept = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step
        if self._stepped:
            self._stepped, self._bad_window = False, None
            if self._kept is not None:
                self._kept.hold()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        # An infinite loss may have finite gradients. Made NaN, they reach every process through
        # the mean over processes: all of them leave the step out, or none does.
        if self.action == "skip" and loss.requires_grad:
            loss.register_hook(nan_where(not_finite(loss)))  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._stepped = True
        self._bad_gradients = not_finite(largest(gradients)) if gradients else None
        if self.action == "skip" and self._bad_gradients is not None:
            for gradient in gradients:
                gradient.masked_fill_(self._bad_gradients, 0)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.check(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.check(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check(trainer, pl_module)
        count, self._left_out = self._left_out, 0
        if count and trainer.is_global_zero:
            steps = "optimiser step was" if count == 1 else "optimiser steps were"
            logger.warning(
                f"epoch {trainer.current_epoch}: {count} {steps} left out (on_nonfinite=skip), "
                f"the images are named in {self._batches.file}"
            )

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks now, at the weights too, and waits for the device.

        Every process has to call it at the same place. Nothing happens outside training.
        :data:`MOST_BEFORE_SAVING` bad steps in a row up to here are too many.

        Raises:
            UserError: as the class says.
        """
        if self._bad is None:
            return
        weights = [p.detach() for p in pl_module.parameters() if p.is_floating_point()]
        flags = torch.stack([self._bad, not_finite(largest(weights))]).int()
        bad, bad_weights = distributed.max_over_ranks(flags).tolist()
        if bad:
            self._answer(trainer)
        if bad_weights:
            place = f"epoch {trainer.current_epoch}, optimiser step {self._step} (from 0)"
            self._stop(trainer, f"weights are not finite after {place}")
        if self._batches.read:
            self._stop_in_a_row(trainer, MOST_BEFORE_SAVING)

    def _note(self, trainer: pl.Trainer, outputs: Any, batch: Any) -> None:
        """Flags the batch and keeps what it needs to be named; looks where it is time to."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._bad is None or not isinstance(loss, Tensor):
            return
        bad_gradients, self._bad_gradients = self._bad_gradients, None
        bad_loss = not_finite(loss)
        if self._kept is not None:
            bad = bad_loss if self._bad_window is None else self._bad_window | bad_loss
            self._bad_window = bad
            self._kept.restore(bad if bad_gradients is None else bad | bad_gradients)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            bad_gradients = None
        self._bad.logical_or_(bad_loss)
        if bad_gradients is not None:
            self._bad.logical_or_(bad_gradients)
        # Lightning has divided it.
        loss = loss.detach() * trainer.accumulate_grad_batches
        place = trainer.current_epoch, self._step
        self._batches.add(Batch(*place, batch[0].detach(), loss, bad_gradients))
        self._count += 1
        if self._count % self._looks_every == 0:
            self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        """Reads the flag of the look before this one, where it is there."""
        assert self._bad is not None
        if self._late.pending:
            # Alone, the host looks again later. Several have to find it at the same batch, and
            # wait for a copy that was begun many batches ago.
            arrived = self._late.take(wait=distributed.world_size() > 1)
            if arrived is None:
                return
            if arrived:
                self._answer(trainer)
        self._late.send(distributed.max_over_ranks(self._bad.int()))
        if self._late.immediate and self._late.take():
            self._answer(trainer)

    def _answer(self, trainer: pl.Trainer) -> None:
        """Has the bad batches written down, and stops or goes on."""
        assert self._bad is not None
        self._bad.zero_()
        self._late.drop()
        stopping = self.action == "stop"
        found = self._batches.find("stopped" if stopping else "skipped")
        if stopping and found:
            self._stop(trainer, f"{found[0]}; its images are named in {str(self._batches.file)!r}")
        self._left_out += len(found)
        self._stop_in_a_row(trainer, MOST_IN_A_ROW)

    def _stop_in_a_row(self, trainer: pl.Trainer, most: int) -> None:
        count = self._batches.in_a_row
        if count >= most:
            self._stop(
                trainer,
                f"the last {count} optimiser steps, up to step {self._step} (from 0) in epoch "
                f"{trainer.current_epoch}, had to be left out; their images are named in "
                f"{str(self._batches.file)!r}",
            )

    def _stop(self, trainer: pl.Trainer, problem: str) -> NoReturn:
        # All of them are here; the first that ends may end the others, who still write.
        trainer.strategy.barrier("not finite")
        found = checkpoints(self.run_dir)
        # Of steps that were left out in a row, some may have come before it.
        last = "the last good checkpoint" if self.action == "stop" else "the last checkpoint"
        kept = f"{last} is {str(found[-1].path)!r}" if found else "there is no checkpoint yet"
        remedies = ["a lower optimizer.lr"]
        if not trainer.gradient_clip_val:
            remedies.append("gradient_clip_val=1")
        if trainer.precision != "32-true":
            remedies.append("precision=32-true")
        if self.action == "stop":
            remedies.append("on_nonfinite=skip, which leaves such batches out")
        raise UserError(f"{problem}; {kept}; try {' or '.join(remedies)}")


def not_finite(x: Tensor) -> Tensor:
    """Whether any value is infinite or NaN, a scalar of bool on the device."""
    return (~x.detach().isfinite()).any()


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute value, a scalar on the device: NaN if any is, and never an overflow."""
    tensors = [x for x in tensors if x.numel()]
    if tensors[0].device.type != "cpu":
        return nn.utils.get_total_norm(tensors, norm_type=math.inf)
    # 20 times faster than that norm there.
    bounds = [bound for x in tensors for bound in x.aminmax()]
    return torch.stack([bound.float() for bound in bounds]).abs().max()


def nan_where(bad: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook that makes a gradient NaN if ``bad``, a scalar on the device, is true."""
    return lambda gradient: gradient.masked_fill(bad, math.nan)
