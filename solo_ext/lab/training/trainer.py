"""The Trainer of a run, with its data module, loggers, progress display and warning filters."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from solo_ext.config.check import trainer_arguments
from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError, UserError, first_line
from solo_ext.core.files import read_jsonl, refuse_link, write_text, writing
from solo_ext.data.batch_augment import BatchAugment, MixDraws, ViewMixer
from solo_ext.data.batch_draws import Draws
from solo_ext.data.dali import DALIViews
from solo_ext.data.loaders import FixedLoader, HeldLoader, ResumableLoader
from solo_ext.data.views import RawBatch, RawBatches
from solo_ext.host.dali_loader import DALILoader
from solo_ext.lab.training.run_dir import CSV, MLFLOW, TENSORBOARD

_PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
_WANDB_FOLDER = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
"""Name of the folder in which W&B keeps a run: when it began, and the run's id."""


def make_trainer(
    run: RunConfig, run_dir: Path, callbacks: list[Callback], lines: Logger
) -> pl.Trainer:
    """Makes the Trainer of a config; its loggers are ``lines`` and those that the config names.

    Raises:
        UserError: Lightning refuses the settings, or lacks the package of a logger.

    >>> from tempfile import mkdtemp
    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> words = ["max_epochs=3", "accelerator=cpu", "precision=32-true"]
    >>> run = check_run(compose("digits/simclr", words))
    >>> folder = Path(mkdtemp())
    >>> trainer = make_trainer(run, folder, [], JsonLines(folder / "metrics.jsonl"))
    >>> trainer.max_epochs, trainer.log_every_n_steps
    (3, 10)
    """
    valid = trainer_arguments()
    arguments = {k: v for k, v in run.model_dump().items() if k in valid}
    if run.on_cpu:
        # Upstream's configs list GPU ids and ask for synchronised batch norm, even for a CPU.
        if isinstance(arguments["devices"], list):
            arguments["devices"] = len(arguments["devices"])
        arguments.pop("sync_batchnorm", None)
    if arguments.get("profiler") in _PROFILERS:
        arguments["profiler"] = _PROFILERS[arguments["profiler"]](run_dir, "profile")
    defaults = {
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 10,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        # These are flags of the process, and an earlier run in it may have set them.
        "deterministic": False,
        "benchmark": False,
        "enable_progress_bar": any(isinstance(c, ProgressBar) for c in callbacks),
    }
    try:
        trainer = pl.Trainer(
            **(defaults | arguments),
            logger=[lines, *_loggers(run, run_dir)],
            callbacks=callbacks,
            default_root_dir=str(run_dir),
            plugins=[_DirectCheckpointIO()],
            enable_checkpointing=run.checkpoint.enabled,
        )
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        raise UserError(f"the Trainer refuses the config: {first_line(error)}") from error
    if trainer.world_size != run.world_size:
        # Within a SLURM job Lightning starts no processes, and takes their number from the job.
        problem = f"{run.world_size} processes are to train, and {trainer.world_size} started"
        raise ConfigError("devices", run.devices, problem, "start one process per device")
    return trainer


class _DirectCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint directly to its path, and reads it by memory mapping.

    Lightning's own class holds the whole file in memory, for reading too. It writes to the system's
    temporary folder first, which may be small, and where a killed process leaves its file. Our
    caller makes the write atomic.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        torch.save(checkpoint, path)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # type: ignore[no-any-return]


def _loggers(run: RunConfig, run_dir: Path) -> list[Any]:
    """Lightning's loggers that the config names.

    Raises:
        ConfigError: the package of one is not installed.
    """
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    make: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: TensorBoardLogger(str(run_dir), name=TENSORBOARD, version=""),
        # Without a fixed version, a resumed run leaves the file of its earlier part alone.
        "csv": lambda: CSVLogger(str(run_dir), name=CSV),
        "mlflow": lambda: MLFlowLogger(
            experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", "solo_ext"),
            run_name=run_dir.name,
            # mlflow no longer takes a folder of files, which is Lightning's default.
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir / MLFLOW}"),
        ),
        "wandb": lambda: WandbLogger(
            name=run.name,
            project=run.wandb.project,
            entity=run.wandb.entity,
            offline=run.wandb.offline,
            save_dir=str(run_dir),
            id=_wandb_id(run_dir),
            resume="allow",
        ),
    }
    named = [
        name for name in make if name in run.loggers or (name == "wandb" and run.wandb.enabled)
    ]
    made = []
    for name in named:
        try:
            made.append(make[name]())
        except ModuleNotFoundError as error:
            asked = "loggers" if name in run.loggers else "wandb.enabled"
            without = f"leave {name} out" if name in run.loggers else "set wandb.enabled=false"
            value = run.loggers if name in run.loggers else True
            remedy = f"`pip install {name}`, or {without}"
            raise ConfigError(asked, value, f"{name} is not installed", remedy) from error
    return made


def _wandb_id(run_dir: Path) -> str | None:
    """The id that W&B gave the run when it was started; ``None`` makes W&B give a new one.

    It cannot be the folder's name, as an id stands for one run in a project that many may share.
    """
    names = (_WANDB_FOLDER.fullmatch(path.name) for path in run_dir.glob("wandb/*"))
    begun = sorted(found.groups() for found in names if found)
    return begun[-1][1] if begun else None


class _DrawnBatch(NamedTuple):
    """A batch, and the random numbers for augmenting and mixing its crops."""

    indices: Tensor
    images: Tensor | list[Tensor]
    """Whole images (N, 3, H, W), uint8; or crops, and then ``views`` is ``None``."""
    targets: Tensor
    views: Draws | None
    mixes: list[MixDraws] | None


class RunData(pl.LightningDataModule):
    """Gives methods ``[indices, [crops], targets]``, whether workers or the device make the crops.

    Random numbers are drawn on the CPU before a batch is moved to the device, and the crops are
    computed afterwards, so that no step waits for the device.
    """

    def __init__(
        self,
        run: RunConfig,
        loader: ResumableLoader | HeldLoader | DALILoader,
        val_loader: FixedLoader | DALIViews | None,
    ) -> None:
        super().__init__()
        self.loader, views = loader, loader.dataset
        self._on_device = run.data.in_memory == "device"
        self.augment: BatchAugment | None = None
        if isinstance(views, RawBatches):
            sides = views.height, views.width
            self.augment = BatchAugment(run.data.dataset, run.augmentations, *sides, run.seed)
        self.mixer = None if run.data.mix is None else ViewMixer(run.data.mix, run.seed)
        if val_loader is not None:
            # Lightning validates if this method merely exists, so set it only if needed.
            self.val_dataloader = lambda: val_loader  # type: ignore[method-assign]

    def train_dataloader(self) -> ResumableLoader | HeldLoader | DALILoader:
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        if self.augment is not None:
            self.augment.to(device)
        if isinstance(self.loader, HeldLoader):
            self.loader.dataset.move(device, self._on_device)
        return self.loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if not self.trainer.training or (self.augment is None and self.mixer is None):
            return batch
        if isinstance(batch, RawBatch):
            epoch, asked, indices, images, targets = batch
        else:
            epoch = self.trainer.current_epoch
            indices, images, targets = batch
            asked = indices
        samples = asked.numpy()
        views = None if self.augment is None else self.augment.draw(epoch, samples)
        mixes = None
        if self.mixer is not None:
            mixes = self.mixer.draw(epoch, samples, len(images if views is None else views))
        if self.trainer.strategy.root_device.type == "cuda":
            # Copying from memory that is not pinned would wait for the device.
            mixes = apply_to_collection(mixes, Tensor, Tensor.pin_memory)
        return _DrawnBatch(indices, images, targets, views, mixes)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not isinstance(batch, _DrawnBatch):
            return batch
        crops: Any = batch.images
        if self.augment is not None and batch.views is not None:
            crops = self.augment(batch.images, batch.views)
        if self.mixer is not None and batch.mixes is not None:
            crops = self.mixer(crops, batch.mixes)
        assert self.trainer is not None
        # Lightning converts crops from workers to its precision earlier; convert these here.
        return [batch.indices, self.trainer.precision_plugin.convert_input(crops), batch.targets]


class JsonLines(Logger):
    """Logger that writes each set of metrics immediately, as one line of JSON.

    >>> import tempfile
    >>> logger = JsonLines(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> logger.log_metrics({"train_loss": 1.5}, step=0)
    >>> read_jsonl(logger.file)[0]["train_loss"]
    1.5
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = refuse_link(file)
        self._begin = time.monotonic()

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {k: _plain(v) for k, v in metrics.items()}
        line = {"step": step, "seconds": round(time.monotonic() - self._begin, 3), **values}
        with writing(self.file), self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def go_on(self, step: int, unlogged: Mapping[str, Any] | None) -> None:
        """Restores the file to what it was when a checkpoint was written.

        Args:
            step: optimiser steps done in the checkpoint; lines of later steps, counted from 0 as in
                Lightning, are dropped, because the run repeats them.
            unlogged: metrics that a killed process may not have logged, and their step; they are
                added if the file lacks them.
        """
        kept: list[dict[str, Any]] = []
        if self.file.is_file():
            for line in read_jsonl(self.file):
                done = line.get("step") or 0
                if isinstance(done, int) and done < step:
                    kept.append(line)
            write_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        before = kept[-1].get("seconds") if kept else None
        if isinstance(before, int | float):
            # Count on from there: the time between two calls is no work.
            self._begin = time.monotonic() - before
        if unlogged is None:
            return
        metrics, last = unlogged["metrics"], unlogged["step"]
        if not any(k["step"] == last and metrics.keys() <= k.keys() for k in kept):
            self.log_metrics(metrics, last)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kw: Any) -> None:
        """Does nothing: the config is in a file of its own."""


def _plain(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def quiet() -> None:
    """Silences Lightning's hints about settings that are intended here.

    >>> quiet()
    >>> logging.getLogger("lightning.pytorch").level == logging.WARNING
    True
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    root = logging.getLogger()
    if _not_about_intervals not in root.filters:
        root.addFilter(_not_about_intervals)
    for message in (
        ".*does not have many workers.*",
        ".*is smaller than the logging interval.*",
        ".*The `srun` command is available.*",
        ".*lr_scheduler.step.*before.*optimizer.step.*",
        ".*Please also save or load the state of the optimizer.*",
        ".*torch.nn.utils.weight_norm.*is deprecated.*",
        ".*Found .* module.* in eval mode.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*validation_step. but have no .val_dataloader.*",
    ):
        warnings.filterwarnings("ignore", message)


def _not_about_intervals(record: logging.LogRecord) -> bool:
    """Drops solo-learn's warning that a per-step schedule cannot be resumed; here it can."""
    return "Using scheduler_interval=step" not in record.getMessage()
