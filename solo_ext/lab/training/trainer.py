"""The Trainer of a run, its loggers, and what they set for the whole process."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.strategies import DDPStrategy

from solo_ext.config.check import trainer_arguments
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.training.checkpoint_io import DirectCheckpointIO
from solo_ext.lab.training.records import package_version

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
CSV, TENSORBOARD = "csv", "tensorboard"
LOGGED = (CSV, TENSORBOARD)
"""Folders of a run directory that loggers make before there is anything to log."""


def make_trainer(
    given: dict[str, Any], run_dir: Path, callbacks: list[Callback], loggers: list[Any]
) -> pl.Trainer:
    """The Trainer that a config asks for.

    Args:
        given: the checked config.
        run_dir: of the run.
        callbacks: of the run.
        loggers: of the run.

    Raises:
        UserError: Lightning refuses the settings.
    """
    valid = set(inspect.signature(pl.Trainer.__init__).parameters) & set(trainer_arguments())
    arguments = {k: v for k, v in given.items() if k in valid}
    on_cpu = given["accelerator"] == "cpu" or (
        given["accelerator"] == "auto" and not torch.cuda.is_available()
    )
    if on_cpu:
        # Upstream's configs list GPU ids and ask for synchronised batch norm.
        if isinstance(arguments["devices"], list):
            arguments["devices"] = len(arguments["devices"])
        arguments.pop("sync_batchnorm", None)
    if arguments["strategy"] == "ddp":
        arguments["strategy"] = DDPStrategy(find_unused_parameters=False)
    defaults = {
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 10,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "enable_progress_bar": any(isinstance(c, ProgressBar) for c in callbacks),
    }
    try:
        return pl.Trainer(
            **(defaults | arguments),
            logger=loggers,
            callbacks=callbacks,
            default_root_dir=str(run_dir),
            plugins=[DirectCheckpointIO()],
            enable_checkpointing=given["checkpoint"]["enabled"],
        )
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"the Trainer refuses the config: {str(error).splitlines()[0]}") from error


def make_loggers(given: dict[str, Any], run_dir: Path, start: int) -> list[Any]:
    """The loggers that a config asks for besides ``metrics.jsonl``.

    Args:
        given: the checked config.
        run_dir: of the run, where they write.
        start: optimiser steps that are done already.

    Raises:
        ConfigError: one is not installed.
    """
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

    made: list[Any] = []
    if "csv" in given["loggers"]:
        made.append(CSVLogger(str(run_dir), name=CSV, version=f"from-step-{start}"))
    if "tensorboard" in given["loggers"]:
        if package_version("tensorboard") is None:
            raise ConfigError(
                "loggers",
                given["loggers"],
                "tensorboard is not installed",
                "pip install tensorboard",
            )
        made.append(TensorBoardLogger(str(run_dir), name=TENSORBOARD, version=""))
    if given["wandb"]["enabled"]:
        if package_version("wandb") is None:
            raise ConfigError(
                "wandb.enabled", True, "wandb is not installed", "pip install wandb, or turn it off"
            )
        made.append(
            WandbLogger(
                name=given["name"],
                project=given["wandb"]["project"],
                entity=given["wandb"]["entity"],
                offline=given["wandb"]["offline"],
                save_dir=str(run_dir),
                id=run_dir.name,
                resume="allow",
            )
        )
    return made


@contextlib.contextmanager
def torch_flags_kept() -> Iterator[None]:
    """Puts back what a Trainer's ``deterministic`` and ``benchmark`` set for the whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    try:
        yield
    finally:
        os.environ.pop(_WORKSPACE, None)
        if workspace is not None:
            os.environ[_WORKSPACE] = workspace
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


def quiet() -> None:
    """Lightning's hints about things that are as intended here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    root = logging.getLogger()
    if _not_about_intervals not in root.filters:
        root.addFilter(_not_about_intervals)
    for message in (
        ".*does not have many workers.*",
        ".*Checkpoint directory .* exists and is not empty.*",
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
    """main doubts that a schedule per step can be resumed; it can, and is tested."""
    return "Using scheduler_interval=step" not in record.getMessage()
