"""Collapse, reported while it happens."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from solo_ext.core.geometry import spread
from solo_ext.lab.training.late_reading import AsyncHostCopy

logger = logging.getLogger(__name__)
METRIC = "train_embedding_spread"
COLLAPSED, RECOVERED = 0.02, 0.05
"""Spreads below and above which it is one, and no more; apart, so that none is reported twice."""
LOOKS = 3
"""In a row, before either is reported."""


class CollapseWatch(Callback):
    """Logs how embeddings of a batch spread over the sphere, and warns where they do not.

    Every ``log_every_n_steps`` optimiser steps, ``train_embedding_spread`` of the first crop's
    embeddings (:func:`solo_ext.core.geometry.spread`): of the projector's, or of the
    backbone's where there is no projector. Computed on the device and read one look later on a GPU.

    Warns once when three looks in a row are below 0.02, and once when three are above 0.05 again.
    """

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None
        self._value: Tensor | None = None
        self._late = AsyncHostCopy()
        self._sent_at = self._low = self._high = 0
        self._collapsed = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (trainer.global_step + 1) % (every or 10) == 0:
            layer: Any = getattr(pl_module, "projector", None) or pl_module.backbone
            self._hook = layer.register_forward_hook(self._measure)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._remove_hook()
        value, self._value = self._value, None
        if value is None:
            return
        pl_module.log(METRIC, value, on_step=True, on_epoch=False)
        if not trainer.is_global_zero:
            return
        self._judge()
        # Still pending: the GPU is far behind, and the next look is soon enough.
        if not self._late.pending:
            self._sent_at = trainer.global_step
            self._late.send(value)
            if self._late.immediate:
                self._judge()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._judge(wait=True)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._remove_hook()

    def _measure(self, module: Any, args: Any, output: Any) -> None:
        if self._value is None:
            # Some of solo-learn's backbones return what belongs to the features, too.
            found = output if isinstance(output, Tensor) else output[0]
            self._value = spread(found.detach().flatten(1))

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _judge(self, *, wait: bool = False) -> None:
        arrived = self._late.take(wait=wait)
        if arrived is None:
            return
        value = float(arrived)
        # Neither for NaN.
        self._low = self._low + 1 if value < COLLAPSED else 0
        self._high = self._high + 1 if value > RECOVERED else 0
        found = f"{value:.2g} of 1 at optimiser step {self._sent_at}"
        if not self._collapsed and self._low == LOOKS:
            self._collapsed = True
            logger.warning(
                f"collapse: embeddings are nearly constant (their spread is {found}); if it stays "
                "so, nothing is learned: look whether the images differ, lower optimizer.lr, take "
                "a larger batch, or turn up what the method has against it; "
                f"metrics.jsonl has {METRIC}"
            )
        elif self._collapsed and self._high == LOOKS:
            self._collapsed = False
            logger.warning(f"no more collapse: embeddings spread again ({found})")
