"""Settings of clusterings of the training set."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from omegaconf import DictConfig

from solo_ext import distributed
from solo_ext.clustering import resolve_backend
from solo_ext.config.types import NonNegativeInt, PositiveFloat, PositiveInt, method_kwargs
from solo_ext.errors import ConfigError
from solo_ext.methods.registry import logger


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
        num_prototypes: K of each granularity.
        warmup_epochs: epochs without prototypes.
        alpha: smooths the concentrations of small clusters.
        e_step: ``exact`` embeds the training set anew, ``bank`` takes the embeddings of training.
        e_step_every: epochs between E-steps.
        kmeans: as :class:`KMeansKwargs`.
    """

    num_prototypes: Annotated[list[PositiveInt], MinLen(1)] = field(
        default_factory=lambda: [25000, 50000, 100000]
    )
    warmup_epochs: NonNegativeInt = 20
    alpha: PositiveFloat = 10.0
    e_step: Literal["exact", "bank"] = "exact"
    e_step_every: PositiveInt = 1
    kmeans: KMeansKwargs = KMeansKwargs()


def check_backend(settings: Any, key: str) -> None:
    """Refuses a k-means backend that the config names and this machine lacks.

    Args:
        settings: :class:`EStepKwargs`.
        key: of the settings in the config.

    Raises:
        ConfigError: naming it.
    """
    if settings.kmeans.backend != "auto":
        settled_backend(settings.kmeans.backend, _any_device(), key)


def settled_backend(name: str, device: torch.device | str, key: str) -> str:
    """The k-means backend that ``name`` means on a device.

    Raises:
        ConfigError: it is not there.
    """
    try:
        return resolve_backend(name, device, sharded=distributed.world_size() > 1)
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
        return settled_backend(named, device, key)
    try:
        return settled_backend(kept, device, key)
    except ConfigError as error:
        taken = settled_backend("auto", device, key)
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
