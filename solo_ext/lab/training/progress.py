"""Progress on the terminal: a bar where one can move, a line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console


class EpochLines(Callback):
    """One line per epoch, for logs and pipes.

    Args:
        label: what is trained.
        console: where to write.
    """

    def __init__(self, label: str, console: Console) -> None:
        self.label, self.console = label, console
        self._begin = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # On every rank: reading them reduces them over the processes.
        metrics = trainer.callback_metrics
        if not trainer.is_global_zero:
            return
        shown = {
            key.removesuffix("_epoch"): float(value)
            for key, value in metrics.items()
            if key.endswith("_epoch") or key.startswith("val_")
        }
        seconds = f"  {time.monotonic() - self._begin:.1f} s" if self._begin else ""
        text = "  ".join(f"{k}={v:.4g}" for k, v in shown.items() if not k.endswith("acc5"))
        epoch = f"{trainer.current_epoch + 1}/{trainer.max_epochs}"
        self.console.print(f"{self.label}  epoch {epoch}  {text}{seconds}", soft_wrap=True)


def progress_callback(label: str) -> Callback:
    """The progress display that suits standard error."""
    if sys.stderr.isatty():
        options: dict[str, Any] = {"stderr": True}
        return RichProgressBar(leave=False, console_kwargs=options)
    return EpochLines(label, Console(stderr=True, highlight=False))
