"""Settings of clusterings of the training set."""

from __future__ import annotations

import platform
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from omegaconf import DictConfig

from solo_ext.clustering import resolve_backend
from solo_ext.config.types import NonNegativeInt, PositiveFloat, PositiveInt, method_kwargs
from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError
from solo_ext.methods.registry import logger

PUBLISHED_CLUSTERS = 25000, 50000, 100000
"""Of PCL for ImageNet."""


@method_kwargs
class KMeansKwargs:
    """How the prototypes are found.

    Attributes:
        backend: ``auto`` takes the fastest that is there; a resumed run keeps it.
        iterations: Lloyd iterations of the first E-step.
        warm_iterations: of the later ones, which start at the means of the one before.
        restarts: cold starts of the first E-step, of which the best is kept.
    """

    backend: Literal["auto", "torch", "faiss", "flash"] = "auto"
    iterations: PositiveInt = 20
    warm_iterations: PositiveInt = 5
    restarts: PositiveInt = 1


@method_kwargs
class EStepKwargs:
    """When the embeddings of the training set are clustered, and into what.

    Attributes:
        num_prototypes: K of each granularity; null: in the paper's proportion to the images.
        warmup_epochs: epochs without prototypes.
        alpha: smooths the concentrations of small clusters.
        e_step: ``exact`` embeds the training set anew, ``bank`` takes the embeddings of training.
        e_step_every: epochs between E-steps.
        e_step_sample: images that k-means finds the prototypes among, drawn anew in every epoch;
            all images are then assigned to them. Null takes all.
        e_step_features: where the embeddings of ``exact`` are during the E-step: ``memory`` (of
            the device), or ``disk``, in a file of which a part at a time is in memory.
        e_step_dir: folder of that file; null is the run directory.
        kmeans: as :class:`KMeansKwargs`.
    """

    num_prototypes: Annotated[list[PositiveInt], MinLen(1)] | None = None
    warmup_epochs: NonNegativeInt = 20
    alpha: PositiveFloat = 10.0
    e_step: Literal["exact", "bank"] = "exact"
    e_step_every: PositiveInt = 1
    e_step_sample: PositiveInt | None = None
    e_step_features: Literal["memory", "disk"] = "memory"
    e_step_dir: str | None = None
    kmeans: KMeansKwargs = KMeansKwargs()


def check_e_step(settings: Any, key: str) -> None:
    """Refuses settings of the E-step that do not fit each other or this machine.

    Args:
        settings: :class:`EStepKwargs`.
        key: of the settings in the config.

    Raises:
        ConfigError: naming the first.
    """
    finest = max(settings.num_prototypes)
    if settings.e_step_sample is not None and settings.e_step_sample < finest:
        raise ConfigError(
            f"{key}.e_step_sample",
            settings.e_step_sample,
            f"k-means cannot find {finest} prototypes among fewer images",
            f"allowed: null, which takes all, or numbers from {finest} on",
        )
    if settings.e_step_features == "disk" and settings.e_step == "bank":
        raise ConfigError(
            f"{key}.e_step_features",
            "disk",
            f"with {key}.e_step=bank the embeddings are in memory, and in every checkpoint",
            "take memory, or e_step=exact",
        )
    if settings.kmeans.backend != "auto":
        settled_backend(settings.kmeans.backend, _any_device(), settings, key)


def check_room(settings: Any, key: str, folder: Path, num_bytes: int) -> None:
    """Refuses a folder that cannot take the embeddings, before the epochs that lead to them.

    Args:
        settings: :class:`EStepKwargs`.
        key: of the settings in the config.
        folder: where the embeddings will be.
        num_bytes: that those of this machine take.

    Raises:
        ConfigError: with the folder.
    """
    named, remedy = f"{key}.e_step_dir", "name a folder on a disk of this machine"
    value, where = settings.e_step_dir, f"{str(folder)!r} on {platform.node()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(named, value, f"{where}: {reason}", remedy) from error
    if free < num_bytes:
        raise ConfigError(
            named,
            value,
            f"{where} has {free / 1e9:.1f} GB left, the embeddings take {num_bytes / 1e9:.1f} GB",
            remedy,
        )


def settled_backend(name: str, device: torch.device | str, settings: Any, key: str) -> str:
    """The k-means backend that ``name`` means on a device.

    Args:
        name: as in the config.
        device: where the features are.
        settings: :class:`EStepKwargs`.
        key: of the settings in the config.

    Raises:
        ConfigError: it is not there, or cannot do what the settings ask for.
    """
    in_file = settings.e_step_features == "disk" and settings.e_step_sample is None
    shared = distributed.world_size() > 1
    try:
        return resolve_backend(name, device, sharded=shared, in_file=in_file)
    except ConfigError as error:
        raise ConfigError(
            f"{key}.kmeans.backend", error.value, error.problem, error.remedy
        ) from None


def kept_backend(settings: Any, key: str, kept: str, device: torch.device) -> str:
    """The k-means backend of a run: what the config names, else the one it has run with.

    Args:
        settings: :class:`EStepKwargs`.
        key: of the settings in the config.
        kept: that of the checkpoint, empty where there is none.
        device: where the features are.

    Raises:
        ConfigError: the config names one that is not there.
    """
    named = settings.kmeans.backend
    if named != "auto" or not kept:
        return settled_backend(named, device, settings, key)
    try:
        return settled_backend(kept, device, settings, key)
    except ConfigError as error:
        taken = settled_backend("auto", device, settings, key)
        logger.warning(f"k-means backend of this run, {kept!r}: {error.problem}; taking {taken!r}")
        return taken


def check_prototypes(cfg: DictConfig, settings: Any, key: str, num_samples: int) -> None:
    """Refuses more prototypes than samples.

    Raises:
        ConfigError: with both numbers.
    """
    if max(settings.num_prototypes) > num_samples:
        raise ConfigError(
            f"{key}.num_prototypes",
            list(settings.num_prototypes),
            f"the training set has {num_samples} images",
            f"allowed: numbers up to {num_samples}",
        )


def warn_of_late_start(cfg: DictConfig, settings: Any, key: str) -> None:
    """Says so where the run ends before the first E-step."""
    if settings.warmup_epochs >= cfg.max_epochs:
        logger.warning(
            f"{key}.warmup_epochs={settings.warmup_epochs} of max_epochs={cfg.max_epochs}: "
            "the prototypes will never be used"
        )


def _any_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
