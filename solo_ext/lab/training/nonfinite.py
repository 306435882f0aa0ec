"""Losses, embeddings and gradients that are not finite: names the batches, and stops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, locked
from solo_ext.data.reading import name_of
from solo_ext.lab.training.run_dir import checkpoints

NONFINITE = "nonfinite.jsonl"
EVERY, EVERY_ON_CPU = 16, 1
"""Batches between two readings on a GPU or with several processes, and of one on a CPU."""
SHORTEST = 1e-12
"""Rows below this length are not normalised to 1; see :func:`torch.nn.functional.normalize`."""
_PROBLEMS = {
    "loss": "the loss is not finite",
    "embeddings": "the length of embeddings is 0 or not finite",
    "gradients": "gradients are not finite",
}


class _Batch(NamedTuple):
    """What is needed to report a batch later; tensors stay on the device.

    Attributes:
        epoch: from 0.
        step: optimiser step that the batch was for, from 0, as in ``metrics.jsonl``.
        indices: (N,) sample indices.
        loss: scalar.
        lengths: (V N,) of the embeddings, crop by crop.
        bad_gradients: scalar bool, whether the step's gradients were not finite; known with the
            last batch of a step only, and not with a gradient scaler.
    """

    epoch: int
    step: int
    indices: Tensor
    loss: Tensor
    lengths: Tensor
    bad_gradients: Tensor


class NonFiniteWatch(Callback):
    """Stops at batches whose loss, gradients or embeddings are not finite.

    Embeddings are those that a method keeps of its step, in the attribute ``step_embeddings``. One
    shorter than :data:`SHORTEST`, or so long that its squares overflow (1.8e19 in fp32), cannot be
    normalised: its gradient is some 1e11, or the loss constant in it, yet both are finite.

    A step only keeps its loss and a flag on the device. Every :data:`EVERY` batches a GPU starts
    to copy them to the host, which reads the copy that was started before, so that it does not
    wait. Before validation, at the end of an epoch and before a checkpoint is written it reads
    everything, so that no checkpoint holds the weights after a bad batch. All processes read at
    the same batches. With a gradient scaler gradients do not count, because the first scaled ones
    are infinite as a rule.

    Lines of ``nonfinite.jsonl`` hold epoch, step, rank, ``what`` (``loss``, ``embeddings`` or
    ``gradients``), the loss, the indices and their names in the data set. A bad loss is reported
    with its own batch, bad embeddings with their own images and ``lengths``, bad gradients with all
    batches of the step. Each process writes its own.

    Raises:
        UserError: in training, at a bad batch, or at weights that are not finite.
    """

    def __init__(self, run_dir: Path, images: Any) -> None:
        self.file, self.images = run_dir / NONFINITE, images
        self._read_every = EVERY
        self._bad_gradients: Tensor | None = None
        self._unread: list[_Batch] = []
        self._sent: tuple[list[_Batch], Tensor, torch.cuda.Event | None] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        alone_on_cpu = pl_module.device.type == "cpu" and trainer.world_size == 1
        self._read_every = EVERY_ON_CPU if alone_on_cpu else EVERY

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        bad = ~largest([p.grad for p in parameters if p.grad is not None]).isfinite()
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._bad_gradients = torch.zeros_like(bad) if scaled else bad

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            return
        bad_gradients, self._bad_gradients = self._bad_gradients, None
        stepped = bad_gradients is not None
        # Lightning divided the loss by the number of batches that accumulate.
        loss = loss.detach().reshape(()).float() * trainer.accumulate_grad_batches
        if bad_gradients is None:
            bad_gradients = torch.zeros_like(loss, dtype=torch.bool)
        # solo-learn's own methods keep no embeddings: some do not normalise them.
        views: Sequence[Tensor] = getattr(pl_module, "step_embeddings", ())
        self._unread.append(
            _Batch(
                epoch=trainer.current_epoch,
                step=trainer.global_step - int(stepped),
                indices=batch[0].detach(),
                loss=loss,
                lengths=torch.cat([_lengths(z) for z in views]) if views else loss.new_empty(0),
                bad_gradients=bad_gradients,
            )
        )
        # Bad gradients are known with the last batch of a step, and name all of its batches.
        if stepped and len(self._unread) >= self._read_every:
            self._look(trainer, wait=loss.device.type == "cpu")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.check(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check(trainer, pl_module)

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads all batches so far and checks the weights, waiting for the device.

        Every process must call it at the same place.

        Raises:
            UserError: as the class says.
        """
        self._look(trainer, wait=True)
        weights = [p.detach() for p in pl_module.parameters() if p.is_floating_point()]
        if distributed.max_over_ranks((~largest(weights).isfinite()).int()):
            place = f"epoch {trainer.current_epoch}, optimiser step {trainer.global_step - 1}"
            self._stop(trainer, f"weights are not finite after {place} (from 0)")

    def _look(self, trainer: pl.Trainer, *, wait: bool) -> None:
        """Reads what the last call has sent and sends what came since; may wait for this too."""
        self._read(trainer)
        self._send()
        if wait:
            self._read(trainer)

    def _send(self) -> None:
        """Starts to copy to the host what the batches since the last call came to."""
        batches, self._unread = self._unread, []
        if not batches:
            return
        losses = torch.stack([batch.loss for batch in batches])
        lengths = torch.stack([_cannot_be_normalised(batch.lengths).any() for batch in batches])
        gradients = torch.stack([batch.bad_gradients for batch in batches])
        flags = torch.stack([~losses.isfinite(), lengths, gradients]).int()
        flags = distributed.max_over_ranks(flags)
        found, copied = torch.cat([losses.unsqueeze(0), flags]), None
        if found.is_cuda:
            host = torch.empty_like(found, device="cpu", pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._sent = batches, found, copied

    def _read(self, trainer: pl.Trainer) -> None:
        """Records the first bad step among what was sent, and stops there."""
        if self._sent is None:
            return
        (batches, found, copied), self._sent = self._sent, None
        if copied is not None:
            copied.synchronize()
        losses, *flags = found.tolist()
        bad = [batch.step for batch, *of_it in zip(batches, *flags, strict=True) if any(of_it)]
        if not bad:
            return
        of_step = [i for i, batch in enumerate(batches) if batch.step == bad[0]]
        what = next(
            kind
            for kind, of_kind in zip(_PROBLEMS, flags, strict=True)
            if any(of_kind[i] for i in of_step)
        )
        lines = [self._line(batches[i], losses[i], what) for i in of_step]
        with locked(self.file.with_name(f".{NONFINITE}.lock")):
            append_lines(self.file, [line for line in lines if line is not None])
        self._stop(
            trainer,
            f"{_PROBLEMS[what]} in epoch {batches[of_step[0]].epoch}, optimiser step {bad[0]} "
            f"(from 0); its images are named in {str(self.file)!r}",
        )

    def _line(self, batch: _Batch, loss: float, what: str) -> dict[str, Any] | None:
        """What the file says of a batch; nothing if another batch or process is the cause."""
        indices, more = batch.indices.tolist(), {}
        if what == "loss" and math.isfinite(loss):
            return None
        if what == "embeddings":
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
            "indices": indices,
            "images": [name_of(self.images, i) for i in indices if 0 <= i < len(self.images)],
            **more,
        }

    def _stop(self, trainer: pl.Trainer, problem: str) -> NoReturn:
        # The first process to end may end the others, so let all finish writing before that.
        trainer.strategy.barrier("not finite")
        found = checkpoints(self.file.parent)
        last = f"the last good checkpoint is {str(found[-1].path)!r}" if found else ""
        remedies = ["a lower optimizer.lr"]
        if not trainer.gradient_clip_val:
            remedies.append("gradient_clip_val=1")
        if trainer.precision != "32-true":
            remedies.append("precision=32-true")
        raise UserError(
            f"{problem}; {last or 'there is no checkpoint yet'}; try {' or '.join(remedies)}"
        )


def _lengths(embeddings: Tensor) -> Tensor:
    """(N,) of embeddings (N, D), as losses see them."""
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    lengths: Tensor = torch.linalg.vector_norm(embeddings, dim=1, dtype=dtype)
    return lengths.float()


def _cannot_be_normalised(lengths: Tensor) -> Tensor:
    return ~((lengths >= SHORTEST) & lengths.isfinite())


def _number(value: float) -> float | str:
    """For JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else str(value)


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
