"""What one sees of a run while it trains: a bar on a terminal, else a line per epoch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar

from solo_ext.lab.training.epoch_log import EpochLog
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


def print_epoch(label: str, labels: bool, trainer: pl.Trainer, times: EpochLog) -> None:
    """Prints the line of an epoch, for logs and pipes.

    Args:
        label: begins the line.
        labels: whether the images have some.
        trainer: of the run.
        times: of its epochs.
    """
    # Every rank must read the metrics, because reading reduces them over the processes.
    numbers = shown_numbers(trainer.callback_metrics, labels=labels)
    if not trainer.is_global_zero:
        return
    done, total = trainer.current_epoch + 1, trainer.max_epochs
    words = [f"{label}  epoch {done}/{total}"]
    words += [f"{name}={value:.4g}" for name, value in numbers.items()]
    words += [f"{times.speed():.4g} images/s", f"data {times.waiting():.0%}"]
    words.append(duration(times.elapsed()))
    if total is not None and 0 < done < total:
        words.append(f"{duration(times.left(total - done))} left")
    # Do not end the run because the terminal is closed or the disk of a log is full.
    with contextlib.suppress(OSError):
        print("  ".join(words), file=sys.stderr, flush=True)


class Bar(RichProgressBar):
    """Lightning's bar with the numbers of :func:`print_epoch`, for a terminal.

    It shows what was logged last: reading a metric of the current step would wait for the device.

    Args:
        labels: whether the images have some.
        times: of the run's epochs.
    """

    def __init__(self, labels: bool, times: EpochLog) -> None:
        super().__init__(leave=False, console_kwargs={"stderr": True})
        self.labels, self.times = labels, times

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        numbers, times = shown_numbers(trainer.logged_metrics, labels=self.labels), self.times
        shown: dict[str, int | str | float | dict[str, float]]
        shown = {name: f"{value:.4g}" for name, value in numbers.items()}
        if times.images:
            shown |= {
                "images/s": f"{times.speed():.4g}",
                "data": f"{times.waiting():.0%}",
            }
        if times.epochs and trainer.max_epochs is not None and trainer.max_epochs > 0:
            left = times.left(trainer.max_epochs - trainer.current_epoch)
            shown["left"] = duration(left)
        return shown
