"""The evaluation protocols while a run trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from solo_ext.data.images import Images
from solo_ext.data.loaders import fixed_loader
from solo_ext.evaluation.features import extract_features
from solo_ext.evaluation.labelled_images import labelled_images
from solo_ext.evaluation.protocols import PROTOCOLS, FeatureProtocol, Features, headline


class OnlineEvaluation(Callback):
    """Logs the headline numbers of protocols, ``online_<protocol>_<number>``.

    Before training, every n epochs and after the last; for example ``online_knn_acc1``.

    The same code, transform and splits as ``solo-ext eval``; the state of training, random
    generators included, is untouched. Rank 0 measures alone.

    Args:
        cfg: the checked config.
        train: training images; those without a label are left out.
        val: validation images, likewise.
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
        self.loaders = tuple(
            fixed_loader(cfg, labelled_images(images, key, cfg["data"].get(key.partition(".")[2])))
            for images, key in ((train, "data.train_path"), (val, "data.val_path"))
        )
        self.every_n_epochs, self.protocols = every_n_epochs, protocols

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self._log(trainer, self._measure(trainer, pl_module), epoch=0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done = trainer.current_epoch + 1
        if done % self.every_n_epochs == 0 or done == trainer.max_epochs:
            self._log(trainer, self._measure(trainer, pl_module), epoch=done)

    def _measure(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, float]:
        accuracies: dict[str, float] = {}
        if trainer.is_global_zero:
            with torch.random.fork_rng():
                backbone: Any = pl_module.backbone
                (train, train_targets), (test, test_targets) = (
                    extract_features(backbone, loader, device=pl_module.device)
                    for loader in self.loaders
                )
                features = Features(
                    train, train_targets, test, test_targets, device=str(pl_module.device)
                )
                for name in self.protocols:
                    protocol = PROTOCOLS[name]()
                    assert isinstance(protocol, FeatureProtocol)
                    numbers = headline(name, protocol.measure(features))
                    accuracies |= {f"online_{name}_{k}": v for k, v in numbers.items()}
        trainer.strategy.barrier("online evaluation")
        return accuracies

    def _log(self, trainer: pl.Trainer, accuracies: dict[str, float], epoch: int) -> None:
        if accuracies:
            step = max(trainer.global_step - 1, 0)
            # At once: Lightning writes what a hook logs with the next step's metrics.
            for logger in trainer.loggers:
                logger.log_metrics({**accuracies, "epochs_done": epoch}, step=step)
            found = "  ".join(f"{k}={v:.2f}" for k, v in accuracies.items())
            Console(stderr=True, highlight=False).print(f"epochs done {epoch}  {found}")
