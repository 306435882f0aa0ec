"""Runs evaluation protocols during training."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch.distributed import distributed_c10d

from solo_ext.config.schema import Images as ImagesSection
from solo_ext.config.schema import OnlineProtocol, RunConfig
from solo_ext.core.distributed import propagate_rank_errors, rank, rank_barrier, world_size
from solo_ext.core.errors import ConfigError
from solo_ext.data.images import Split
from solo_ext.data.loaders import fixed_loader
from solo_ext.data.reading import Images
from solo_ext.lab.evaluation.context import (
    EvalContext,
    evaluation_config,
    measured_images,
)
from solo_ext.lab.evaluation.evaluate import PROTOCOLS
from solo_ext.lab.evaluation.features import Features, Rows, extract_features
from solo_ext.lab.evaluation.models import EvalRun, Model
from solo_ext.lab.evaluation.protocol import WITHOUT_LABELS, measure, protocols_of
from solo_ext.pretrained.files import state_digest

T = TypeVar("T")
_LONGEST = timedelta(days=20)
_calls = itertools.count()


class OnlineEvaluation(Callback):
    """Logs the headline numbers of protocols, such as ``online_knn_acc1``.

    Without labels it measures with the protocols that need none. Without held-out images these see
    some of the training images.

    It measures before training, every n epochs and after the last epoch, as ``solo-ext eval`` does,
    without changing the state of training or its random generators. Rank 0 measures alone. Images
    without a label are left out. Pictures and weights go to ``<out>/epoch-<n>``.

    Raises:
        ConfigError: an unknown or missing setting of a protocol, or one that needs labels, which
            are not there; before training, a protocol that needs all images although unreadable
            ones are skipped.
    """

    def __init__(self, run: RunConfig, train: Images, val: Images | None, out: Path) -> None:
        self.run, self.out = run, out
        given, self.every_n_epochs = run.online_eval, run.online_eval.every_n_epochs
        names = given.protocols or default_protocols(run.data)
        self.protocols = protocols_of(PROTOCOLS, names, given.settings, "online_eval.settings")
        self.images = measured_images(run.data, train, val)
        for name, protocol in self.protocols.items():
            if protocol.needs_labels and self.images.unlabelled is not None:
                raise ConfigError(
                    "online_eval.every_n_epochs",
                    self.every_n_epochs,
                    f"there are no labelled images to evaluate {name} on",
                    "give data.val_path and class folders, set it to 0, or name "
                    f"online_eval.protocols that need no labels: {', '.join(WITHOUT_LABELS)}",
                )
        self.loaders: dict[Split, Any] = {
            "train": fixed_loader(run, self.images.train),
            "val": fixed_loader(run, self.images.test),
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 0:
            self._log(trainer, self._measure(trainer, pl_module, 0), epoch=0)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done = trainer.current_epoch + 1
        last = done == trainer.max_epochs or 0 <= trainer.max_steps <= trainer.global_step
        if last or trainer.should_stop or done % self.every_n_epochs == 0:
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
                found = protocol.headline(measure(protocol, context))
                numbers |= {f"online_{name}_{k}": v for k, v in found.items()}
            # Delete what `transfer` stores: these weights will not be measured again.
            shutil.rmtree(context.out / "features", ignore_errors=True)
        return numbers

    def _context(self, pl_module: pl.LightningModule, epoch: int) -> EvalContext:
        """Keeps the features only in memory, because these weights will not be measured again."""
        backbone: Any = pl_module.backbone
        width: Any = pl_module.features_dim
        if any(p.dtype != torch.float32 for p in backbone.parameters()):
            # Under `precision: bf16-true`, measure in fp32 as an evaluation of the checkpoint does.
            backbone = copy.deepcopy(backbone).float()
        device, out = str(pl_module.device), self.out / f"epoch-{epoch}"
        settings = EvalRun(features_dir=str(out / "features"))
        digest = state_digest(backbone.state_dict())
        model = Model("online", backbone, width, self.run, "online", digest, epoch, out, pl_module)
        cfg = evaluation_config(self.run, settings)
        train, test, unlabelled, drawn = self.images
        context = EvalContext(model, settings, cfg, train, test, device, out)
        context = replace(context, unlabelled=unlabelled, drawn=drawn)

        def extracted(split: Split) -> Rows:
            loader, images = self.loaders[split], train if split == "train" else test
            rows = extract_features(backbone, loader, device=device)
            context.note_skipped(split, images, loader.skipped)
            return rows

        train_rows, test_rows = partial(extracted, "train"), partial(extracted, "val")
        context.features = Features(train_rows, test_rows, context.class_names)
        return context

    def _log(self, trainer: pl.Trainer, accuracies: dict[str, float], epoch: int) -> None:
        if accuracies:
            step = max(trainer.global_step - 1, 0)
            # Lightning would write what a hook logs only together with the next step's metrics.
            for logger in trainer.loggers:
                logger.log_metrics({**accuracies, "epochs_done": epoch}, step=step)
            found = "  ".join(f"{k}={v:.2f}" for k, v in accuracies.items())
            # Do not end the run because the terminal is closed or the disk of a log is full.
            with contextlib.suppress(OSError):
                print(f"epochs done {epoch}  {found}", file=sys.stderr, flush=True)


def default_protocols(data: ImagesSection) -> list[OnlineProtocol]:
    """The protocols of ``online_eval`` if its config names none.

    >>> default_protocols(ImagesSection(dataset="custom", no_labels=True))
    ['views', 'geometry']
    """
    return ["views", "geometry"] if data.no_labels else ["knn"]


def on_first(work: Callable[[], T], device: torch.device) -> T | None:
    """Runs ``work`` on rank 0 while the other ranks wait, however long it takes.

    In a collective the other ranks would run into the process group's timeout. Instead they wait
    for a key in the group's store, which rank 0 sets when ``work`` is done.

    Args:
        work: must not use collectives.
        device: the process group must be able to send from it.

    Returns:
        What ``work`` returned on rank 0, ``None`` elsewhere.

    Raises:
        RankError: another rank failed within :func:`propagate_rank_errors` before this call.
        UserError: the same, if that rank's error is a ``UserError``.

    >>> on_first(lambda: 87.5, torch.device("cpu"))
    87.5
    """
    if world_size() == 1:
        return work()
    rank_barrier(device)
    # All ranks make the same calls, so a counter gives each call its own key.
    store: Any = distributed_c10d._get_default_store()
    key = f"solo_ext/on_first/{next(_calls)}"
    if rank() > 0:
        store.wait([key], _LONGEST)
        return None
    try:
        return work()
    finally:
        store.set(key, "done")
