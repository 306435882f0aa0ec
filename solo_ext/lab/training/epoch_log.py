"""The times of a run's epochs: taken while it trains, a line of JSON each, and read again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.core.files import append_lines, read_jsonl, refuse_link
from solo_ext.lab.training.run_dir import EPOCHS

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_NOTHING: dict[str, Any] = {"batches": 0, "seconds": 0.0}
"""Of an epoch that was not begun before."""


class EpochLog(Callback):
    """Times the epochs of a run, and writes a line about each, which :func:`read_epochs` reads.

    A line has the number of the epoch from 0, its images, its seconds of training, and peak memory
    of the first process in bytes. The seconds count from the start of the epoch, an E-step
    included, to its last batch: the validation at its end, evaluation and checkpoints come later.

    A run that goes on within an epoch adds to the seconds and images of its checkpoint. If these
    are unknown, the epoch gets no line. If a killed run repeats an epoch, it gets a second line.

    Args:
        run_dir: the run directory; a run that begins anew there removes the lines of another.
        images: number of images of a batch, over all processes.

    Attributes:
        show: called at the end of each epoch, in every process.
        epochs: how many this process has ended.
        images: of this epoch so far, on which this process has trained.

    >>> from tempfile import mkdtemp
    >>> log, trainer, method = EpochLog(Path(mkdtemp()), 64), pl.Trainer(logger=False), None
    >>> log.on_train_batch_start(trainer, method, [], 0)
    >>> log.on_train_batch_end(trainer, method, None, [], 0)
    >>> log.epochs, log.images, 0 <= log.waiting() <= 1
    (0, 64, True)
    """

    def __init__(self, run_dir: Path, images: int) -> None:
        self.file, self._of_batch = refuse_link(run_dir / EPOCHS), images
        self.show: Callable[[pl.Trainer, EpochLog], object] = lambda *_: None
        self.epochs = self._batches = 0
        self._seconds = self._waited = 0.0
        self._before: dict[str, Any] = _NOTHING
        self._begin = self._since = self._last = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        batches, seconds = self._before["batches"], self._before["seconds"]
        return {"batches": batches + self._batches, "seconds": seconds + self._seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = {key: state_dict[key] for key in _NOTHING}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # Lightning starts no epoch when it resumes within one.
        self._begin = self._since = self._last = time.monotonic()
        if trainer.global_step == 0 and trainer.is_global_zero:
            self.file.unlink(missing_ok=True)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._batches, self._seconds, self._waited = 0, 0.0, 0.0
        self._before = _NOTHING
        self._since = self._last = time.monotonic()
        if not self.epochs:
            # An evaluation before training tells nothing about how long epochs take.
            self._begin = self._since

    def on_train_batch_start(self, *_: Any) -> None:
        self._waited += self._passed()

    def on_train_batch_end(self, *_: Any) -> None:
        self._passed()
        self._batches += 1

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epochs += 1
        batches, seconds = self.state_dict().values()
        known = batches == trainer.fit_loop.epoch_loop.batch_idx + 1
        if known and trainer.is_global_zero:
            line = {
                "epoch": trainer.current_epoch,
                "images": batches * self._of_batch,
                "seconds": round(seconds, 4),
                "resident": _resident(),
                "cuda": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            }
            append_lines(self.file, [line])
        self.show(trainer, self)

    def _passed(self) -> float:
        """The time since the last call; it is added to the seconds of the epoch."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        self._seconds += passed
        return passed

    @property
    def images(self) -> int:
        return self._batches * self._of_batch

    def waiting(self) -> float:
        """Share of the time in which no step ran, since this epoch began or was resumed."""
        return self._waited / max(self._seconds, 1e-9)

    def speed(self) -> float:
        """Images per second of training, since this epoch began or was resumed."""
        return self.images / max(self._seconds, 1e-9)

    def elapsed(self) -> float:
        """Seconds since this epoch began or was resumed, with its evaluation."""
        return time.monotonic() - self._since

    def left(self, epochs: int) -> float:
        """Seconds that so many epochs take, by the mean of those so far."""
        return epochs * (time.monotonic() - self._begin) / max(self.epochs, 1)


def _resident() -> int | None:
    try:
        import resource
    except ImportError:
        # Windows has no such module.
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def read_epochs(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of :class:`EpochLog` in a run directory, one per epoch, in their order.

    Of an epoch that was repeated, the last line counts. What is no such line is left out.

    >>> from tempfile import mkdtemp
    >>> run_dir = Path(mkdtemp())
    >>> for epoch, seconds in ((0, 3.0), (1, 2.5), (1, 2.0)):
    ...     append_lines(run_dir / EPOCHS, [{"epoch": epoch, "images": 64, "seconds": seconds}])
    >>> [line["seconds"] for line in read_epochs(run_dir)]
    [3.0, 2.0]
    """
    needed = "epoch", "images", "seconds"
    lines = read_jsonl(run_dir / EPOCHS)
    whole = (x for x in lines if all(isinstance(x.get(key), int | float) for key in needed))
    by_number = {line["epoch"]: line for line in whole}
    return [by_number[number] for number in sorted(by_number)]
