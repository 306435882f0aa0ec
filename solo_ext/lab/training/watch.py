"""Callbacks that report problems while the run continues: collapse, unreadable images."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from solo_ext.core.files import append_lines, locked, read_jsonl
from solo_ext.data.reading import name_of, reason_of
from solo_ext.losses.alignment import spread

logger = logging.getLogger(__name__)
METRIC = "train_embedding_spread"
_OUTPUT = "_first_output_of_step"
COLLAPSED, PATIENCE = 0.02, 3
"""Embeddings with less spread have collapsed; after so many measurements in a row, we warn."""
UNREADABLE = "unreadable.jsonl"


class CollapseWatch(Callback):
    """Logs how the embeddings of a batch spread over the sphere, and warns when they collapse.

    Every ``log_every_n_steps`` optimiser steps, which are those that Lightning logs, the callback
    logs ``train_embedding_spread`` (:func:`solo_ext.losses.alignment.spread`) of the first crop's
    embeddings: the projector's output, or the backbone's if there is no projector. It warns when
    three measurements in a row are below 0.02.
    """

    def __init__(self) -> None:
        self._unhook: Callable[[], None] | None = None
        self._measures = False
        self._low = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        layer: Any = getattr(pl_module, "projector", None) or pl_module.backbone
        attributes = pl_module.__dict__

        def keep(module: Any, args: Any, output: Any) -> None:
            if attributes.get(_OUTPUT) is None:
                # Some of solo-learn's backbones return further tensors after the features.
                found = output if isinstance(output, Tensor) else output[0]
                # An attribute of the method is there after a step that is replayed, too.
                attributes[_OUTPUT] = found.detach()

        self._unhook = _after_each_call(layer, keep)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pl_module.__dict__[_OUTPUT] = None
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._measures = (trainer.global_step + 1) % (every or 10) == 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        output = pl_module.__dict__.pop(_OUTPUT, None)
        if self._measures and output is not None:
            value = spread(output.flatten(1))
            pl_module.log(METRIC, value, on_step=True, on_epoch=False)
            if trainer.is_global_zero:
                self._judge(float(value), trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    def _judge(self, value: float, step: int) -> None:
        self._low = self._low + 1 if value < COLLAPSED else 0
        if self._low == PATIENCE:
            logger.warning(
                f"collapse: embeddings are nearly constant (their spread is {value:.2g} of 1 at "
                f"optimiser step {step}); if it stays so, nothing is learned: look whether the "
                "images differ, lower optimizer.lr, take a larger batch, or turn up what the "
                f"method has against it; metrics.jsonl has {METRIC}"
            )


def _after_each_call(layer: Any, measure: Callable[..., None]) -> Callable[[], None]:
    """Passes each output of a layer on; returns what ends this."""
    compiled = layer._compiled_call_impl
    if compiled is None:
        return layer.register_forward_hook(measure).remove  # type: ignore[no-any-return]

    # A hook would be compiled with the layer, which would have to be compiled again.
    def measured(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        measure(layer, args, output)
        return output

    layer._compiled_call_impl = measured
    return lambda: setattr(layer, "_compiled_call_impl", compiled)


class UnreadableReport(Callback):
    """Lists skipped images in a file, one line of JSON with ``image`` and ``reason`` for each.

    A line is added as soon as a batch lacks the image. Every process adds its own lines, and a
    resumed run continues the same file. The callback warns once, after the first epoch that skipped
    an image.
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
        trainer.strategy.barrier("unreadable images")
        if self._warned or not trainer.is_global_zero:
            return
        count = len(read_jsonl(self.file))
        self._warned = count > 0
        if count:
            images, are = ("image", "is") if count == 1 else ("images", "are")
            logger.warning(
                f"{count} {images} cannot be read and {are} left out, named in {self.file}"
            )

    def _write(self) -> None:
        for loader, written in zip(self.loaders, self._written, strict=True):
            # Compare indices and not counts: each validation pass starts a new list.
            new = [index for index in loader.skipped if index not in written]
            if not new:
                continue
            views: Any = loader.dataset
            written.update(new)
            names = {name_of(views.images, i): reason_of(views.images, i) for i in new}
            add_lines(self.file, names)


def add_lines(file: Path, names: dict[str, str]) -> None:
    """Appends a line for every name that the file lacks; several processes may do so at once.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "unreadable.jsonl"
    >>> add_lines(file, {"cat/1.png": "it is empty"})
    >>> add_lines(file, {"cat/1.png": "it is empty", "dog/7.png": "it is cut short"})
    >>> [line["image"] for line in read_jsonl(file)]
    ['cat/1.png', 'dog/7.png']
    """
    with locked(file.with_name(f".{file.name}.lock")):
        known = {line.get("image") for line in read_jsonl(file)}
        new = [{"image": n, "reason": reason} for n, reason in names.items() if n not in known]
        append_lines(file, new)
