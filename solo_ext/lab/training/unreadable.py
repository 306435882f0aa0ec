"""Which images a run left out because they cannot be read."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from solo_ext.core.files import refuse_link, writing
from solo_ext.data.reading import name_of, reason_of

logger = logging.getLogger(__name__)
UNREADABLE = "unreadable.txt"


class UnreadableReport(Callback):
    """Names the images that were skipped in a file, ``<name> TAB <reason>``, each once.

    A line is added as soon as a batch went without the image. Every process adds its own; a
    resumed run goes on with the file. Warns once, after the first epoch that skipped any.

    Args:
        file: ``unreadable.txt`` of the run directory.
        loaders: of training and validation, :class:`~solo_ext.data.loaders.ResumableLoader` and
            :class:`~solo_ext.data.loaders.FixedLoader`.
    """

    def __init__(self, file: Path, loaders: list[Any]) -> None:
        self.file, self.loaders = file, loaders
        self._written: list[set[int]] = [set() for _ in loaders]
        self._warned = False

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._write()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write()
        if self._warned:
            return
        trainer.strategy.barrier("unreadable images")
        count = len(_lines(self.file))
        # Of the same file on every rank, so that they all meet again or none does.
        count = int(trainer.strategy.broadcast(count))
        self._warned = count > 0
        if count and trainer.is_global_zero:
            logger.warning(
                f"{count} {'image' if count == 1 else 'images'} cannot be read and "
                f"{'is' if count == 1 else 'are'} left out, named in {self.file}"
            )

    def _write(self) -> None:
        for loader, written in zip(self.loaders, self._written, strict=True):
            # A pass of validation has its own: as many may be others.
            new = [index for index in loader.skipped if index not in written]
            if not new:
                continue
            views: Any = loader.dataset
            written.update(new)
            names = {name_of(views.images, i): reason_of(views.images, i) for i in new}
            add_lines(self.file, names)


def add_lines(file: Path, names: dict[str, str]) -> None:
    """Adds a line for every name that the file has none of; several processes may do so at once."""
    # A name on disk need not be UTF-8.
    with (
        writing(file),
        refuse_link(file).open("a+", encoding="utf-8", errors="surrogateescape") as held,
    ):
        # Windows has no such lock.
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.lockf(held, fcntl.LOCK_EX)
        held.seek(0)
        known = {line.partition("\t")[0] for line in held}
        held.seek(0, os.SEEK_END)
        for name, reason in names.items():
            plain = " ".join(name.split())
            if plain not in known:
                held.write(f"{plain}\t{reason}\n")


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
