"""The evaluation protocols while a run trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.data.datasets import Images
from solo_ext.data.loaders import fixed_loader
from solo_ext.evaluation.features import extract_features
from solo_ext.evaluation.protocols import PROTOCOLS, Features, headline


class OnlineEvaluation(Callback):
    """Logs ``online_<protocol>_acc1`` of the frozen backbone every n epochs and at the last.

    The same code, transform and splits as ``solo-ext eval``; the state of training, random
    generators included, is untouched. Rank 0 measures alone.

    Args:
        cfg: the checked config.
        train: training images.
        val: validation images.
        every_n_epochs: above 0.
        protocols: names in :data:`solo_ext.evaluation.protocols.PROTOCOLS`.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any],
        train: Images,
        val: Images,
        every_n_epochs: int,
        protocols: Sequence[str],
    ) -> None:
        self.loaders = (fixed_loader(cfg, train), fixed_loader(cfg, val))
        self.every_n_epochs, self.protocols = every_n_epochs, protocols

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done = trainer.current_epoch + 1
        if done % self.every_n_epochs and done != trainer.max_epochs:
            return
        if trainer.is_global_zero:
            with torch.random.fork_rng():
                parts: list[Any] = []
                for loader in self.loaders:
                    backbone: Any = pl_module.backbone
                    parts += extract_features(backbone, loader, device=pl_module.device)
                features = Features(*parts)
                for name in self.protocols:
                    accuracy = headline(name, PROTOCOLS[name]().measure(features))
                    pl_module.log(f"online_{name}_acc1", accuracy, rank_zero_only=True)
        trainer.strategy.barrier("online evaluation")
