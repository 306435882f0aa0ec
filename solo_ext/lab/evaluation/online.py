"""Evaluation protocols during training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console

from solo_ext.config.schema import RunConfig
from solo_ext.core.distributed import on_first, propagate_rank_errors
from solo_ext.core.errors import ConfigError
from solo_ext.data.loaders import fixed_loader
from solo_ext.data.reading import Images
from solo_ext.lab.evaluation.context import (
    SPLITS,
    EvalContext,
    evaluation_config,
    labelled_images,
)
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, headline
from solo_ext.lab.evaluation.features import Features, extract_features
from solo_ext.lab.evaluation.models import EvalRun, Model
from solo_ext.lab.evaluation.protocol import BackboneProtocol, Protocol, measure, protocols_of
from solo_ext.pretrained.files import state_digest


def online_protocols(run: RunConfig) -> dict[str, Protocol]:
    """The protocols that ``online_eval`` of a checked config names, with their settings.

    Raises:
        ConfigError: a setting that a protocol does not have or lacks, or a protocol that needs all
            images although unreadable ones are skipped.
    """
    given = run.online_eval
    chosen = protocols_of(PROTOCOLS, given.protocols, given.settings, "online_eval.settings")
    for name, protocol in chosen.items():
        if isinstance(protocol, BackboneProtocol) and run.data.unreadable == "skip":
            raise ConfigError(
                "online_eval.protocols",
                name,
                "it needs every image, and data.unreadable=skip leaves some out",
                "name protocols on features, such as knn and linear",
            )
    return chosen


class OnlineEvaluation(Callback):
    """Logs the headline numbers of protocols, such as ``online_knn_acc1``.

    It measures before training, every n epochs and after the last one, as ``solo-ext eval`` does;
    the state of training, random generators included, is not changed. Rank 0 measures alone.
    Pictures and weights of protocols go to ``<out>/epoch-<n>``.

    Args:
        run: the checked config.
        train: training images; those without a label are left out.
        val: validation images, likewise.
        every_n_epochs: above 0.
        protocols: of :func:`online_protocols`.
        out: folder.
    """

    def __init__(
        self,
        run: RunConfig,
        train: Images,
        val: Images,
        every_n_epochs: int,
        protocols: Mapping[str, Protocol],
        out: Path,
    ) -> None:
        self.run, self.out = run, out
        self.train, self.val = (
            labelled_images(images, f"data.{split}_path", run.data.path(split))
            for images, split in zip((train, val), SPLITS, strict=True)
        )
        self.loaders = fixed_loader(run, self.train), fixed_loader(run, self.val)
        self.every_n_epochs, self.protocols = every_n_epochs, protocols

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self._log(trainer, self._measure(trainer, pl_module, 0), epoch=0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done = trainer.current_epoch + 1
        last = done == trainer.max_epochs or 0 <= trainer.max_steps <= trainer.global_step
        if last or done % self.every_n_epochs == 0:
            self._log(trainer, self._measure(trainer, pl_module, done), epoch=done)

    def _measure(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int
    ) -> dict[str, float]:
        # If rank 0 fails, the other ranks raise an error too instead of waiting for it.
        with propagate_rank_errors(pl_module.device):
            return on_first(partial(self._numbers, pl_module, epoch), pl_module.device) or {}

    def _numbers(self, pl_module: pl.LightningModule, epoch: int) -> dict[str, float]:
        numbers: dict[str, float] = {}
        with isolate_rng():
            context = self._context(pl_module, epoch)
            for name, protocol in self.protocols.items():
                found = headline(name, measure(protocol, context))
                numbers |= {f"online_{name}_{k}": v for k, v in found.items()}
            # transfer stores features of its data sets, but these weights will not come again.
            shutil.rmtree(context.out / "features", ignore_errors=True)
        return numbers

    def _context(self, pl_module: pl.LightningModule, epoch: int) -> EvalContext:
        """Context of the current backbone, whose features are kept only in memory."""
        backbone: Any = pl_module.backbone
        width: Any = pl_module.features_dim
        device, out = str(pl_module.device), self.out / f"epoch-{epoch}"
        settings = EvalRun(features_dir=str(out / "features"))
        digest = state_digest(backbone.state_dict())
        model = Model("online", backbone, width, self.run, "online", digest, epoch, out)
        cfg = evaluation_config(self.run, settings)
        context = EvalContext(model, settings, cfg, self.train, self.val, device, out)
        train, test = (extract_features(backbone, part, device=device) for part in self.loaders)
        context.features = Features(train, test, context.class_names)
        return context

    def _log(self, trainer: pl.Trainer, accuracies: dict[str, float], epoch: int) -> None:
        if accuracies:
            step = max(trainer.global_step - 1, 0)
            # Lightning would write what a hook logs only together with the next step's metrics.
            for logger in trainer.loggers:
                logger.log_metrics({**accuracies, "epochs_done": epoch}, step=step)
            found = "  ".join(f"{k}={v:.2f}" for k, v in accuracies.items())
            Console(stderr=True, highlight=False).print(f"epochs done {epoch}  {found}")
