"""Finds non-finite losses, embeddings and gradients, records their batches, stops or skips."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, locked, read_jsonl
from solo_ext.data.reading import name_of
from solo_ext.lab.training.lightning_internals import after_own_hook
from solo_ext.lab.training.run_dir import checkpoints
from solo_ext.memory.state import State

logger = logging.getLogger(__name__)
NONFINITE = "nonfinite.jsonl"
_STATE = "solo_ext_nonfinite"
"""Key in checkpoints of the counts of skipped steps."""
EVERY, EVERY_ON_CPU = 16, 1
"""Batches between two readings: on a GPU or with several processes; in one process on a CPU."""
MAX_CONSECUTIVE_BAD = 32
"""After so many bad steps in a row `skip` stops too: the weights or the data are broken."""
MOST_BEFORE_SAVING = 4
"""The same limit just before a checkpoint replaces the last good one."""
NORM_EPS = 1e-12
"""Smallest L2 norm that :func:`torch.nn.functional.normalize` scales to 1."""


class _Batch(NamedTuple):
    """What is needed to report a batch later; tensors stay on the device."""

    epoch: int
    step: int
    """Optimiser step that the batch was for, from 0, as in ``metrics.jsonl``."""
    indices: Tensor
    loss: Tensor
    gradients: Tensor | None
    """Largest norm of the gradients; only of the last batch of an optimiser step, and never with a
    gradient scaler."""
    lengths: Tensor | None
    """(V N,) L2 norms of embeddings, crop by crop."""


class NonFiniteWatch(Callback):
    """Stops at batches whose loss, gradients or embeddings are not finite, or skips them.

    The embeddings are those that a method stores in its attribute ``step_embeddings``. An embedding
    whose L2 norm is below :data:`NORM_EPS`, or so large that its squares overflow (1.8e19 in fp32),
    cannot be normalised: its gradient is about 1e11, or the loss does not depend on it, yet both
    are finite.

    A step only stores its loss and norms on the device: six launches, whatever the network. Every
    :data:`EVERY` batches a GPU judges them and starts to copy the verdicts to the host, and the
    host reads the previous copy, so that it does not wait. Before
    validation, at the end of an epoch and before a checkpoint is written, the host reads
    everything, so that no checkpoint holds the weights after a bad batch. All processes read at the
    same batches.

    ``skip`` zeroes the gradients of the optimiser step and restores all buffers to their values
    before it, on the device. With a gradient scaler, gradients never count as bad, because the
    first scaled gradients are usually infinite.

    A line of ``nonfinite.jsonl`` holds epoch, step, rank, ``what`` (``loss``, ``embeddings`` or
    ``gradients``), the loss, ``then`` (``stopped`` or ``skipped``), and the indices and names of
    the images. A bad loss is reported with its own batch, bad embeddings with their own images and
    ``lengths``, bad gradients with all batches of the step. Each process writes its own lines.

    Raises:
        UserError: in training: a bad batch with ``stop``, too many bad steps in a row with
            ``skip``, or weights that are not finite.
    """

    def __init__(self, run_dir: Path, images: Any, action: Literal["stop", "skip"]) -> None:
        self.file, self.images, self.action = run_dir / NONFINITE, images, action
        self._read_every = EVERY
        self._stepped = True
        self._snapshot: _BufferSnapshot | None = None
        self._bad_window: Tensor | None = None
        self._gradients: Tensor | None = None
        self._lengths: Tensor | None = None
        self._unread: list[_Batch] = []
        self._sent: tuple[list[_Batch], Tensor, torch.cuda.Event | None] | None = None
        self._step = self._in_a_row = self._left_out = 0
        self._accumulate = 1
        self._last_bad = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._snapshot = _BufferSnapshot(pl_module) if self.action == "skip" else None
        alone_on_cpu = pl_module.device.type == "cpu" and distributed.world_size() == 1
        self._read_every = EVERY_ON_CPU if alone_on_cpu else EVERY
        after_own_hook(pl_module, lambda outputs, batch, _: self._keep(trainer, outputs, batch))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step
        if self._stepped:
            self._stepped, self._bad_window = False, None
            if self._snapshot is not None:
                self._snapshot.hold()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        # solo-learn's own methods have no `step_embeddings`, because some do not normalise theirs.
        views: Sequence[Tensor] = getattr(pl_module, "step_embeddings", ())
        self._lengths = _lengths(views) if views else None
        self.spoil(pl_module, loss)

    def spoil(self, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """With ``skip``, lets a bad loss or bad embeddings make all gradients NaN.

        An infinite loss may have finite gradients. The mean of NaN over processes is NaN on all
        ranks, so that all skip the step.
        """
        if self.action == "skip" and loss.requires_grad:
            views: Sequence[Tensor] = getattr(pl_module, "step_embeddings", ())
            bad = _is_bad(loss.detach(), _lengths(views) if views else None)
            loss.register_hook(lambda gradient: gradient.masked_fill(bad, math.nan))  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._stepped = True
        self._gradients = _norm(gradients) if gradients else None
        if self.action == "skip" and self._gradients is not None:
            bad = ~self._gradients.isfinite()
            for gradient in gradients:
                gradient.masked_fill_(bad, 0)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._check(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._check(trainer, pl_module)
        checkpoint[_STATE] = [self._in_a_row, self._left_out, self._last_bad]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._in_a_row, self._left_out, self._last_bad = checkpoint.get(_STATE, (0, 0, -1))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check(trainer, pl_module)
        count, self._left_out = self._left_out, 0
        if count and trainer.is_global_zero:
            steps = "optimiser step was" if count == 1 else "optimiser steps were"
            logger.warning(
                f"epoch {trainer.current_epoch}: {count} {steps} left out (on_nonfinite=skip), "
                f"the images are named in {self.file}"
            )

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads the flags of all batches so far and checks the weights; this waits for the device.

        Every process must call it at the same place.
        """
        for _ in range(2):
            self._read(trainer)
            self._send()
        weights = [p.detach() for p in pl_module.parameters() if p.is_floating_point()]
        if distributed.max_over_ranks((~_norm(weights).isfinite()).int()):
            place = f"epoch {trainer.current_epoch}, optimiser step {self._step} (from 0)"
            self._stop(trainer, f"weights are not finite after {place}")
        self._stop_in_a_row(trainer, MOST_BEFORE_SAVING)

    def _keep(self, trainer: pl.Trainer, outputs: Any, batch: Any) -> None:
        """Restores the buffers after a bad step, and stores what reporting the batch needs."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            return
        loss, lengths = loss.detach().reshape(()), self._lengths
        gradients, self._gradients = self._gradients, None
        if self._snapshot is not None:
            bad = _is_bad(loss, lengths)
            self._bad_window = bad if self._bad_window is None else self._bad_window | bad
            of_step = bad if gradients is None else ~gradients.isfinite()
            self._snapshot.restore(self._bad_window | of_step)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            gradients = None
        place = trainer.current_epoch, self._step
        # Lightning divided the loss by the number of batches that accumulate.
        self._accumulate = trainer.accumulate_grad_batches
        self._unread.append(_Batch(*place, batch[0].detach(), loss, gradients, lengths))
        # Read whole steps only: bad gradients, known with the last batch, concern all its batches.
        if self._stepped and len(self._unread) >= self._read_every:
            self._read(trainer)
            self._send()
            if loss.device.type == "cpu":
                self._read(trainer)

    def _send(self) -> None:
        """Starts to copy the losses and flags of the batches since the last call to the host."""
        batches, self._unread = self._unread, []
        if not batches:
            return
        losses = torch.stack([batch.loss for batch in batches]).float() * self._accumulate
        flags = torch.stack([~losses.isfinite(), *_bad_norms(batches, losses)]).int()
        flags = distributed.max_over_ranks(flags)
        found, copied = torch.cat([losses.unsqueeze(0), flags]), None
        if found.is_cuda:
            host = torch.empty_like(found, device="cpu", pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._sent = batches, found, copied

    def _read(self, trainer: pl.Trainer) -> None:
        """Finds the bad steps in the last copy, records them, and stops the run if necessary."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        batches, found, copied = sent
        if copied is not None:
            copied.synchronize()
        entries = zip(batches, *found.tolist(), strict=True)
        for step, group in itertools.groupby(entries, lambda entry: entry[0].step):
            held = list(group)
            _, _, *flags = zip(*held, strict=True)
            by_loss, by_lengths, by_gradients = map(any, flags)
            known = step == self._last_bad
            # Bad gradients of a step already known to be bad add nothing.
            if not by_loss and not by_lengths and (known or not by_gradients):
                self._in_a_row = self._in_a_row if known else 0
                continue
            what = "loss" if by_loss else "embeddings" if by_lengths else "gradients"
            lines = [self._line(batch, loss, what) for batch, loss, *_ in held]
            self._write([line for line in lines if line is not None])
            if self.action == "stop":
                say = {
                    "loss": "the loss is not finite",
                    "embeddings": "the length of embeddings is 0 or not finite",
                    "gradients": "gradients are not finite",
                }[what]
                self._stop(
                    trainer,
                    f"{say} in epoch {held[0][0].epoch}, optimiser step {step} (from 0); its "
                    f"images are named in {str(self.file)!r}",
                )
            if not known:
                self._last_bad = step
                self._in_a_row, self._left_out = self._in_a_row + 1, self._left_out + 1
        self._stop_in_a_row(trainer, MAX_CONSECUTIVE_BAD)

    def _line(self, batch: _Batch, loss: float, what: str) -> dict[str, Any] | None:
        """The file's line about a batch; ``None`` if another batch or process is the cause."""
        indices, more = batch.indices.tolist(), {}
        if what == "loss" and math.isfinite(loss):
            return None
        if what == "embeddings":
            rows, lengths = list[int](), {}
            if batch.lengths is not None:
                rows = _cannot_be_normalised(batch.lengths).nonzero().flatten().tolist()
                lengths = {indices[row % len(indices)]: batch.lengths[row].item() for row in rows}
            if not lengths:
                return None
            indices = list(lengths)
            more["lengths"] = [_number(length) for length in lengths.values()]
        return {
            "epoch": batch.epoch,
            "step": batch.step,
            "rank": distributed.rank(),
            "what": what,
            "loss": _number(loss),
            "then": "stopped" if self.action == "stop" else "skipped",
            "indices": indices,
            "images": [name_of(self.images, i) for i in indices if 0 <= i < len(self.images)],
            **more,
        }

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        if not lines:
            return
        with locked(self.file.with_name(f".{NONFINITE}.lock")):
            # A resumed run sees the same batches again, and must not record them twice.
            known = read_jsonl(self.file)
            append_lines(self.file, [line for line in lines if line not in known])

    def _stop_in_a_row(self, trainer: pl.Trainer, most: int) -> None:
        if self._in_a_row >= most:
            self._stop(
                trainer,
                f"the last {self._in_a_row} optimiser steps, up to step {self._step} (from 0) in "
                f"epoch {trainer.current_epoch}, had to be left out; their images are named in "
                f"{str(self.file)!r}",
            )

    def _stop(self, trainer: pl.Trainer, problem: str) -> NoReturn:
        # The first rank that exits may end the others, so let all finish writing before that.
        trainer.strategy.barrier("not finite")
        found = checkpoints(self.file.parent)
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


def _lengths(views: Sequence[Tensor]) -> Tensor:
    """L2 norms (V N,) of embeddings, each (N, D), in fp32 or more like the losses."""
    embeddings = torch.cat(tuple(views))
    dtype = embeddings.dtype if embeddings.dtype.itemsize > 4 else torch.float32
    lengths: Tensor = torch.linalg.vector_norm(embeddings, dim=1, dtype=dtype)
    return lengths.float()


def _cannot_be_normalised(lengths: Tensor) -> Tensor:
    return ~((lengths >= NORM_EPS) & lengths.isfinite())


def _is_bad(loss: Tensor, lengths: Tensor | None) -> Tensor:
    bad = ~loss.isfinite()
    return bad if lengths is None else bad | _cannot_be_normalised(lengths).any()


def _bad_norms(batches: Sequence[_Batch], losses: Tensor) -> tuple[Tensor, Tensor]:
    """Of each batch, whether embeddings cannot be normalised and whether gradients are not finite.

    ``losses`` is of the size and on the device of the answers.
    """
    lengths = gradients = torch.zeros_like(losses, dtype=torch.bool)
    # A method has embeddings in every step or in none.
    held = [batch.lengths for batch in batches if batch.lengths is not None]
    norms = [batch.gradients for batch in batches if batch.gradients is not None]
    if len({x.shape for x in held}) == 1:
        lengths = _cannot_be_normalised(torch.stack(held)).any(1)
    elif held:
        lengths = torch.stack([_cannot_be_normalised(x).any() for x in held])
    if norms:
        zero = torch.zeros_like(norms[0])
        whole = [zero if batch.gradients is None else batch.gradients for batch in batches]
        gradients = ~torch.stack(whole).isfinite()
    return lengths, gradients


def _number(value: float) -> float | str:
    """The value as JSON can hold it: infinity and NaN become strings."""
    return value if math.isfinite(value) else str(value)


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The largest L2 norm, a scalar on the device; NaN or infinite if any value is.

    It is infinite too where squares overflow, at 1.8e19 in fp32: no optimiser survives that.
    """
    tensors = [x for x in tensors if x.numel()]
    half = any(x.dtype == torch.float16 for x in tensors)
    dtype = torch.float32 if half else None
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).max()


class _BufferSnapshot:
    """A copy of all buffers (running statistics, queues, priors, memories) before a step.

    It leaves out parameters, because a step with zeroed gradients does not harm them, and frozen
    submodules of the method.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._held: dict[tuple[nn.Module, str], Tensor] = {}

    @torch.no_grad()
    def hold(self) -> None:
        found = dict(self._buffers())
        known = {k for k, v in self._held.items() if k in found and _alike(v, found[k])}
        self._held = {k: self._held[k] if k in known else v.clone() for k, v in found.items()}
        if known:
            held, now = ([side[k] for k in known] for side in (self._held, found))
            torch._foreach_copy_(held, now)

    @torch.no_grad()
    def restore(self, bad: Tensor) -> None:
        """Restores the copy if ``bad`` is true; the host does not read ``bad``."""
        # Look buffers up by name, because some methods replace the tensor itself.
        for key, now in self._buffers():
            held = self._held.get(key)
            if held is not None and _alike(held, now):
                torch.where(bad, held, now, out=now)

    def _buffers(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        frozen = {
            part
            for module in self._root.modules()
            if isinstance(module, State) and module.frozen
            for part in module.modules()
        }
        for module in self._root.modules():
            if module not in frozen:
                for name, buffer in module.named_buffers(recurse=False):
                    yield (module, name), buffer.detach()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
