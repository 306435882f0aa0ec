"""Which of the last batches were bad, and the file that names them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.files import append_lines, locked, read_jsonl
from solo_ext.data.reading import name_of

NONFINITE = "nonfinite.jsonl"


@dataclass(frozen=True)
class Batch:
    """What is needed to name a batch later; tensors stay on the device.

    Attributes:
        epoch: from 0.
        step: optimiser step that the batch was for, from 0, as in ``metrics.jsonl``.
        indices: (N,) sample indices.
        loss: scalar.
        bad_gradients: scalar of bool, whether the step's gradients were not finite; ``None``
            before the last batch of a step, and where that means nothing.
    """

    epoch: int
    step: int
    indices: Tensor
    loss: Tensor
    bad_gradients: Tensor | None


@dataclass(frozen=True)
class BadStep:
    """An optimiser step of which a loss, or else the gradients, were not finite in any process."""

    epoch: int
    step: int
    by_loss: bool

    def __str__(self) -> str:
        what = "the loss is" if self.by_loss else "gradients are"
        return f"{what} not finite in epoch {self.epoch}, optimiser step {self.step} (from 0)"


class BadBatches:
    """Keeps the last batches, and finds and writes down the bad ones among them.

    Lines of ``nonfinite.jsonl`` hold epoch, step, rank, ``what`` (``loss`` or ``gradients``), the
    loss, ``then`` (``stopped`` or ``skipped``), the indices and what the data set calls them. A
    loss names its own batch, gradients name all batches of the step. Each process writes its own.

    Attributes:
        file: ``nonfinite.jsonl`` of the run directory.
        in_a_row: bad optimiser steps up to the last batch that was looked at.

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
        """Keeps a batch; the tensors must not be written to later."""
        self._recent.append(batch)
        self._unread += 1

    def find(self, then: str) -> list[BadStep]:
        """Reads the batches since the last call, and writes down the bad ones.

        Waits for the device. Every process has to call it at the same batch.

        Args:
            then: ``stopped``, which is about the first bad step alone, or ``skipped``.

        Returns:
            The bad steps that were not known before, the same for every process.
        """
        unread, self._unread = self._unread, 0
        if unread > len(self._recent):
            # Those that were dropped gave no reason to look at them.
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
            # The gradients of a step that is known to be bad say nothing new.
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
        """Whether all batches were looked at."""
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
            # A resumed run meets the same batches again.
            known = read_jsonl(self.file)
            append_lines(self.file, [line for line in given if line not in known])


def _read(batches: Sequence[Batch]) -> tuple[list[float], list[bool], list[bool]]:
    """Own losses, and whether a loss or gradients were bad in any process, of each batch."""
    if not batches:
        return [], [], []
    losses = torch.stack([batch.loss.reshape(()).float() for batch in batches])
    none = torch.zeros_like(losses[0], dtype=torch.bool)
    gradients = torch.stack([none if b.bad_gradients is None else b.bad_gradients for b in batches])
    flags = distributed.max_over_ranks(torch.stack([~losses.isfinite(), gradients]).int())
    bad_losses, bad_gradients = flags.bool().tolist()
    return losses.tolist(), bad_losses, bad_gradients
