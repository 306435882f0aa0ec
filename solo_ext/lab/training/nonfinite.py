"""Non-finite losses and gradients: finds the batches, and stops at them or skips them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, locked, read_jsonl
from solo_ext.data.reading import name_of
from solo_ext.lab.training.lightning_internals import after_own_hook, remove_hooks
from solo_ext.lab.training.run_dir import checkpoints
from solo_ext.lab.training.watch import AsyncHostCopy
from solo_ext.memory.state import Unsynchronised

logger = logging.getLogger(__name__)
NONFINITE = "nonfinite.jsonl"
EVERY = 16
"""Batches between two readings of the flag, on devices where reading costs time."""
MOST_IN_A_ROW = 32
"""After so many bad steps in a row `skip` stops too: the weights or the data are spoilt."""
MOST_BEFORE_SAVING = 4
"""The same limit just before a checkpoint replaces the last good one."""


class NonFiniteWatch(Callback):
    """Stops at batches whose loss or gradients are not finite, or skips them.

    A step only sets a flag on the device. The host reads the flag every :data:`EVERY` batches on a
    GPU, through a copy that it does not wait for, and after every batch on a CPU. It always reads
    it before validation, at the end of an epoch and before a checkpoint is written, so that no
    checkpoint holds the weights after a bad batch. All processes read it at the same batches.

    ``skip`` zeroes the gradients of the optimiser step and restores all buffers to their values
    before it, on the device. With a gradient scaler only losses count as bad, because the first
    scaled gradients are infinite as a rule.

    Args:
        run_dir: the run directory; :class:`BadBatches` writes there.
        images: the training images, by sample index.
        action: ``stop`` or ``skip``.
        every: batches between two readings, instead of the default.

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
        after_own_hook(pl_module, lambda outputs, batch, _: self._note(trainer, outputs, batch))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        remove_hooks(trainer, pl_module)
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
        # An infinite loss may have finite gradients. Make them NaN: through the mean over processes
        # this reaches all of them, so that all skip the step.
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
        """Reads the flag and checks the weights now, waiting for the device.

        Every process must call it at the same place; outside training it does nothing.

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
        """Sets the flag for a bad batch, and keeps what is needed to report the batch later."""
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
        # Lightning divided the loss by the number of batches that accumulate.
        loss = loss.detach() * trainer.accumulate_grad_batches
        place = trainer.current_epoch, self._step
        self._batches.add(Batch(*place, batch[0].detach(), loss, bad_gradients))
        self._count += 1
        if self._count % self._looks_every == 0:
            self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        """Reads the flag that the last call sent, if it has arrived, and sends it again."""
        assert self._bad is not None
        if self._late.pending:
            # A single process can try again later. Several must find the flag at the same batch,
            # so they wait for a copy that started many batches ago.
            arrived = self._late.take(wait=distributed.world_size() > 1)
            if arrived is None:
                return
            if arrived:
                self._answer(trainer)
        self._late.send(distributed.max_over_ranks(self._bad.int()))
        if self._late.immediate and self._late.take():
            self._answer(trainer)

    def _answer(self, trainer: pl.Trainer) -> None:
        """Records the bad batches, then stops or continues."""
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
        # The first process to end may end the others, so let all finish writing before that.
        trainer.strategy.barrier("not finite")
        found = checkpoints(self.run_dir)
        # With `skip` some skipped steps may be older than the checkpoint.
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
    """Whether any value is infinite or NaN, as a scalar bool on the device.

    >>> not_finite(torch.tensor([1.0, float("inf")]))
    tensor(True)
    """
    return (~x.detach().isfinite()).any()


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Largest absolute value as a scalar on the device; NaN if any is, and never an overflow.

    >>> largest([torch.tensor([1.0, -3.0]), torch.tensor([2.0])])
    tensor(3.)
    """
    tensors = [x for x in tensors if x.numel()]
    if tensors[0].device.type != "cpu":
        return nn.utils.get_total_norm(tensors, norm_type=math.inf)
    # On a CPU this is 20 times faster than the norm.
    bounds = [bound for x in tensors for bound in x.aminmax()]
    return torch.stack([bound.float() for bound in bounds]).abs().max()


def nan_where(bad: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook that makes a gradient NaN if ``bad``, a scalar on the device, is true.

    >>> nan_where(torch.tensor(True))(torch.ones(2))
    tensor([nan, nan])
    """
    return lambda gradient: gradient.masked_fill(bad, math.nan)


@dataclass(frozen=True)
class Batch:
    """Data to report a batch later. Tensors stay on the device.

    Attributes:
        epoch: from 0.
        step: optimiser step that the batch was for, from 0, as in ``metrics.jsonl``.
        indices: (N,) sample indices.
        loss: scalar.
        bad_gradients: scalar bool, whether the step's gradients were not finite; ``None`` before
            the last batch of a step, and with a gradient scaler.
    """

    epoch: int
    step: int
    indices: Tensor
    loss: Tensor
    bad_gradients: Tensor | None


@dataclass(frozen=True)
class BadStep:
    """An optimiser step with a non-finite loss, or else non-finite gradients, in any process."""

    epoch: int
    step: int
    by_loss: bool

    def __str__(self) -> str:
        what = "the loss is" if self.by_loss else "gradients are"
        return f"{what} not finite in epoch {self.epoch}, optimiser step {self.step} (from 0)"


class BadBatches:
    """Keeps the last batches, and finds and records the bad ones among them.

    Lines of ``nonfinite.jsonl`` hold epoch, step, rank, ``what`` (``loss`` or ``gradients``), the
    loss, ``then`` (``stopped`` or ``skipped``), the indices and their names in the data set. A bad
    loss is reported with its own batch, bad gradients with all batches of the step. Each process
    writes its own.

    Attributes:
        file: ``nonfinite.jsonl`` of the run directory.
        in_a_row: bad optimiser steps in a row, up to the last batch that was read.

    Args:
        run_dir: the run directory.
        images: the training images, by sample index.
        keep: number of batches that are kept.
    """

    def __init__(self, run_dir: Path, images: Any, keep: int) -> None:
        self.file, self.images = run_dir / NONFINITE, images
        self.in_a_row = 0
        self._recent: deque[Batch] = deque(maxlen=keep)
        self._unread = 0
        self._known: set[int] = set()

    def add(self, batch: Batch) -> None:
        """Keeps a batch; its tensors must not be modified later."""
        self._recent.append(batch)
        self._unread += 1

    def find(self, then: str) -> list[BadStep]:
        """Reads the batches since the last call, and records the bad ones.

        It waits for the device. Every process must call it at the same batch.

        Args:
            then: ``stopped``, which records only the first bad step, or ``skipped``.

        Returns:
            The bad steps that were not known before, the same for every process.
        """
        unread, self._unread = self._unread, 0
        if unread > len(self._recent):
            # Batches that were dropped unread were good.
            self.in_a_row = 0
        recent = list(self._recent)[-unread:] if unread else []
        steps: dict[int, list[tuple[Batch, float, bool, bool]]] = {}
        for entry in zip(recent, *_read(recent), strict=True):
            steps.setdefault(entry[0].step, []).append(entry)
        found: list[BadStep] = []
        lines: list[dict[str, Any]] = []
        for step, batches in steps.items():
            by_loss = any(bad_loss for _, _, bad_loss, _ in batches)
            by_gradients = any(bad_gradients for *_, bad_gradients in batches)
            known = step in self._known
            # Bad gradients of a step already known to be bad add nothing.
            if not by_loss and (known or not by_gradients):
                self.in_a_row = self.in_a_row if known else 0
                continue
            what = "loss" if by_loss else "gradients"
            named = [(b, v) for b, v, *_ in batches if not by_loss or not math.isfinite(v)]
            lines += [self._line(batch, value, what, then) for batch, value in named]
            if not known:
                self._known.add(step)
                self.in_a_row += 1
                found.append(BadStep(batches[0][0].epoch, step, by_loss))
            if then == "stopped":
                break
        self._write(lines)
        return found

    @property
    def read(self) -> bool:
        """Whether all batches were read."""
        return not self._unread

    def _line(self, batch: Batch, loss: float, what: str, then: str) -> dict[str, Any]:
        indices = batch.indices.tolist()
        return {
            "epoch": batch.epoch,
            "step": batch.step,
            "rank": distributed.rank(),
            "what": what,
            "loss": loss if math.isfinite(loss) else str(loss),
            "then": then,
            "indices": indices,
            "images": [name_of(self.images, i) for i in indices if 0 <= i < len(self.images)],
        }

    def _write(self, given: Sequence[dict[str, Any]]) -> None:
        if not given:
            return
        with locked(self.file.with_name(f".{NONFINITE}.lock")):
            # A resumed run sees the same batches again, and must not record them twice.
            known = read_jsonl(self.file)
            append_lines(self.file, [line for line in given if line not in known])


def _read(batches: Sequence[Batch]) -> tuple[list[float], list[bool], list[bool]]:
    """For each batch: its loss here, and whether any process had a bad loss or bad gradients."""
    if not batches:
        return [], [], []
    losses = torch.stack([batch.loss.reshape(()).float() for batch in batches])
    none = torch.zeros_like(losses[0], dtype=torch.bool)
    gradients = torch.stack([none if b.bad_gradients is None else b.bad_gradients for b in batches])
    flags = distributed.max_over_ranks(torch.stack([~losses.isfinite(), gradients]).int())
    bad_losses, bad_gradients = flags.bool().tolist()
    return losses.tolist(), bad_losses, bad_gradients


class BufferSnapshot:
    """A copy of all buffers (running statistics, queues, priors, memories) from before a step.

    Parameters are left out, because a step with zeroed gradients does not spoil them.

    Args:
        root: the method; its frozen subtrees are left out.

    >>> norm = nn.BatchNorm1d(2)
    >>> snapshot = BufferSnapshot(norm)
    >>> snapshot.hold()
    >>> _ = norm(torch.full((4, 2), torch.nan))
    >>> snapshot.restore(torch.tensor(True))
    >>> norm.running_mean
    tensor([0., 0.])
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._held: dict[tuple[nn.Module, str], Tensor] = {}

    @torch.no_grad()
    def hold(self) -> None:
        """Copies the current buffers."""
        found = dict(self._buffers())
        known = {k for k, v in self._held.items() if k in found and _alike(v, found[k])}
        self._held = {k: self._held[k] if k in known else v.clone() for k, v in found.items()}
        if known:
            held, now = ([side[k] for k in known] for side in (self._held, found))
            torch._foreach_copy_(held, now)

    @torch.no_grad()
    def restore(self, bad: Tensor) -> None:
        """Restores the copy where ``bad`` is true, without the host reading ``bad``.

        Args:
            bad: scalar of bool.
        """
        # Buffers are found by name, because some methods replace the tensor itself.
        for key, now in self._buffers():
            held = self._held.get(key)
            if held is not None and _alike(held, now):
                torch.where(bad, held, now, out=now)

    def _buffers(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        frozen = {
            part
            for module in self._root.modules()
            if isinstance(module, Unsynchronised) and module.frozen
            for part in module.modules()
        }
        for module in self._root.modules():
            if module not in frozen:
                for name, buffer in module.named_buffers(recurse=False):
                    yield (module, name), buffer.detach()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
