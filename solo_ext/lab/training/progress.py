"""What one sees of a run while it trains: a bar on a terminal, else a line per epoch."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar

from solo_ext.lab.training.watch import METRIC

_OF_LABELS = ("class_loss", "acc1", "acc5")
"""What the classifier beside the method logs; without labels it learns nothing."""
_NOT_SHOWN = ("acc5", "n_positives")
_SUFFIXES = ("_epoch", "_step")


def shown_numbers(metrics: Mapping[str, Any], *, labels: bool) -> dict[str, float]:
    """The numbers to show of all that are logged, by short names.

    These are the losses, what a method averages over an epoch, what is validated, and the spread of
    the embeddings; the classifier's numbers only if there are ``labels``.

    >>> logged = {
    ...     "train_nce_loss_step": 4.3,
    ...     "train_nce_loss_epoch": 4.2,
    ...     "train_class_loss_epoch": 0.0,
    ...     "train_embedding_spread": 0.75,
    ...     "e_step/seconds_kmeans": 0.1,
    ... }
    >>> shown_numbers(logged, labels=False)
    {'nce_loss': 4.2, 'spread': 0.75}
    """
    found: dict[str, float] = {}
    for suffix in ("_step", "", "_epoch"):
        # A mean over the epoch replaces the value of a step.
        for key, value in metrics.items():
            ends = next((end for end in _SUFFIXES if key.endswith(end)), "")
            name = key.removesuffix(ends).removeprefix("train_")
            wanted = ends == "_epoch" or name.endswith("loss") or name.startswith("val_")
            if ends == suffix and wanted and "/" not in key:
                found[name] = float(value)
    if METRIC in metrics:
        found["spread"] = float(metrics[METRIC])
    unseen = _NOT_SHOWN if labels else (*_NOT_SHOWN, *_OF_LABELS)
    return {name: value for name, value in found.items() if name.removeprefix("val_") not in unseen}


class _Timed(Callback):
    """Times epochs, and how long the steps of one wait for their data.

    >>> timed, trainer, method = _Timed(64), pl.Trainer(logger=False), pl.LightningModule()
    >>> timed.on_train_batch_start(trainer, method, [], 0)
    >>> timed.on_train_batch_end(trainer, method, None, [], 0)
    >>> timed.epochs, timed.images, 0 <= timed.waiting() <= 1
    (0, 64, True)
    """

    def __init__(self, images: int, **given: Any) -> None:
        super().__init__(**given)
        self.of_step = images
        self._begin_run()

    def _begin_run(self) -> None:
        self.epochs, self._begin = 0, time.monotonic()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.since = self._last = time.monotonic()
        self.images, self._training, self._waited = 0, 0.0, 0.0

    def on_train_start(self, *given: Any) -> None:
        self._begin_run()
        super().on_train_start(*given)

    def on_train_epoch_start(self, *given: Any) -> None:
        self._begin_epoch()
        super().on_train_epoch_start(*given)

    def on_train_batch_start(self, *given: Any) -> None:
        now = time.monotonic()
        self._waited += now - self._last
        self._last = now
        super().on_train_batch_start(*given)

    def on_train_batch_end(self, *given: Any) -> None:
        now = time.monotonic()
        self._training += now - self._last
        self._last = now
        self.images += self.of_step
        super().on_train_batch_end(*given)

    def on_train_epoch_end(self, *given: Any) -> None:
        self.epochs += 1
        super().on_train_epoch_end(*given)

    def waiting(self) -> float:
        """Share of the time in which no step ran, since the first batch was asked for."""
        return self._waited / max(self._waited + self._training, 1e-9)

    def speed(self) -> float:
        """Images per second of training, without what is done between epochs."""
        return self.images / max(self._waited + self._training, 1e-9)

    def seconds(self) -> float:
        """Seconds of this epoch."""
        return time.monotonic() - self.since

    def left(self, epochs: int) -> float:
        """Seconds that so many epochs take, by the mean of those so far."""
        return epochs * (time.monotonic() - self._begin) / max(self.epochs, 1)


def duration(seconds: float) -> str:
    """A duration in its two largest units.

    >>> duration(8), duration(200), duration(9000), duration(200000)
    ('8 s', '3 min', '2 h 30 min', '2 d 7 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 60 * 24:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class _EpochLines(_Timed):
    """Prints one line per epoch, for logs and pipes."""

    def __init__(self, label: str, labels: bool, images: int) -> None:
        super().__init__(images)
        self.label, self.labels = label, labels

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        # Every rank must read the metrics, because reading reduces them over the processes.
        metrics = trainer.callback_metrics
        if not trainer.is_global_zero:
            return
        numbers = shown_numbers(metrics, labels=self.labels)
        done, total = trainer.current_epoch + 1, trainer.max_epochs
        words = [f"{self.label}  epoch {done}/{total}"]
        words += [f"{name}={value:.4g}" for name, value in numbers.items()]
        words += [f"{self.speed():.4g} images/s", f"data {self.waiting():.0%}"]
        words.append(duration(self.seconds()))
        if total is not None and 0 < done < total:
            words.append(f"{duration(self.left(total - done))} left")
        # Do not end the run because the terminal is closed or the disk of a log is full.
        with contextlib.suppress(OSError):
            print("  ".join(words), file=sys.stderr, flush=True)


class _Bar(_Timed, RichProgressBar):
    """Lightning's bar with the numbers of :class:`_EpochLines`.

    It shows what was logged last: reading a metric of the current step would wait for the device.
    """

    def __init__(self, labels: bool, images: int) -> None:
        super().__init__(images, leave=False, console_kwargs={"stderr": True})
        self.labels = labels

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        numbers = shown_numbers(trainer.logged_metrics, labels=self.labels)
        shown: dict[str, int | str | float | dict[str, float]]
        shown = {name: f"{value:.4g}" for name, value in numbers.items()}
        if self.images:
            shown |= {
                "images/s": f"{self.speed():.4g}",
                "data": f"{self.waiting():.0%}",
            }
        if self.epochs and trainer.max_epochs is not None and trainer.max_epochs > 0:
            left = self.left(trainer.max_epochs - trainer.current_epoch)
            shown["left"] = duration(left)
        return shown


def progress_callback(label: str, *, labels: bool, images: int, plain: bool = False) -> Callback:
    """A progress bar if standard error is a terminal, otherwise one line per epoch.

    Args:
        label: begins each line.
        labels: whether the images have some.
        images: number of images of a step, over all processes.
        plain: lines on a terminal too.

    >>> type(progress_callback("pcl", labels=True, images=256)).__name__
    '_EpochLines'
    """
    if sys.stderr.isatty() and not plain:
        return _Bar(labels, images)
    return _EpochLines(label, labels, images)
