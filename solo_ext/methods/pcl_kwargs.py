"""Settings of prototypical contrastive learning."""

from __future__ import annotations

import logging
from dataclasses import field
from typing import Annotated, Literal

import torch
from annotated_types import MinLen
from omegaconf import DictConfig

from solo_ext import distributed
from solo_ext.clustering import resolve_backend
from solo_ext.config.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    method_kwargs,
)
from solo_ext.errors import ConfigError

logger = logging.getLogger(__name__)
RARE = 0.05
"""Share of anchors with a batch-mate in their cluster up to which `auto` leaves them be."""


@method_kwargs
class KMeansKwargs:
    """``method_kwargs.kmeans``: how the prototypes are found.

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
class PCLKwargs:
    """``method_kwargs`` of :class:`solo_ext.methods.PCL`; defaults of the official ImageNet runs.

    Attributes:
        head: ``v1`` is linear, ``v2`` an MLP without batch norm.
        proj_hidden_dim: width of the MLP's hidden layer; null is the width of the features.
        proj_output_dim: D of the embeddings.
        temperature: of InfoNCE, and mean of the concentrations.
        queue_size: number of past embeddings.
        num_prototypes: K of each granularity.
        proto_weight: weight of ProtoNCE beside InfoNCE; 0 leaves MoCo, without an E-step.
        warmup_epochs: epochs of InfoNCE alone.
        alpha: smooths the concentrations of small clusters.
        e_step: ``exact`` embeds the training set anew, ``bank`` takes the embeddings of training.
        e_step_every: epochs between E-steps.
        num_negatives: prototypes drawn as negatives at every step; null takes all.
        collisions: with drawn negatives, as :func:`solo_ext.losses.proto_nce_loss_func` takes it;
            ``auto`` merges where more than one anchor in twenty can be expected to share its
            cluster with a batch-mate.
        symmetric: each view is query and key in turn; else, as published, the first is the query.
        kmeans: as :class:`KMeansKwargs`.
    """

    head: Literal["v1", "v2"] = "v2"
    proj_hidden_dim: PositiveInt | None = None
    proj_output_dim: PositiveInt = 128
    temperature: PositiveFloat = 0.2
    queue_size: PositiveInt = 16384
    num_prototypes: Annotated[list[PositiveInt], MinLen(1)] = field(
        default_factory=lambda: [25000, 50000, 100000]
    )
    proto_weight: NonNegativeFloat = 1.0
    warmup_epochs: NonNegativeInt = 20
    alpha: PositiveFloat = 10.0
    e_step: Literal["exact", "bank"] = "exact"
    e_step_every: PositiveInt = 1
    num_negatives: PositiveInt | None = None
    collisions: Literal["auto", "paper", "merge"] = "auto"
    symmetric: bool = False
    kmeans: KMeansKwargs = KMeansKwargs()


def settle(cfg: DictConfig) -> DictConfig:
    """Checks what the settings need of each other and of the data, and decides ``auto``.

    Raises:
        ConfigError: data without sample indices, more drawn negatives than there are, or a k-means
            backend that is not there.
    """
    kwargs = cfg.method_kwargs
    dali = cfg.get("dali") or {}
    if cfg.data.get("format") == "dali" and not dali.get("encode_indexes_into_labels"):
        raise ConfigError(
            "dali.encode_indexes_into_labels",
            dali.get("encode_indexes_into_labels"),
            f"{cfg.method} looks clusters up by sample index, which DALI's batches then lack",
            "set it to true",
        )
    if cfg.data.get("format") == "dali" and cfg.data.get("fraction", -1) > 0:
        raise ConfigError(
            "data.fraction",
            cfg.data.fraction,
            "DALI numbers the samples of a fraction in an order of its own",
            "use all images, or data.format=image_folder",
        )
    if not kwargs.symmetric and cfg.momentum.classifier:
        raise ConfigError(
            "momentum.classifier",
            True,
            "without method_kwargs.symmetric the momentum backbone sees one view only",
            "remove it, or set method_kwargs.symmetric=true",
        )
    coarsest, batch = min(kwargs.num_prototypes), cfg.optimizer.batch_size
    if kwargs.num_negatives is not None and kwargs.num_negatives > coarsest - batch:
        raise ConfigError(
            "method_kwargs.num_negatives",
            kwargs.num_negatives,
            f"of {coarsest} prototypes up to {batch} are positives of the batch",
            f"allowed: up to {coarsest - batch}" if coarsest > batch else "take null, which is all",
        )
    if kwargs.collisions == "auto":
        kwargs.collisions = "merge" if (batch - 1) / coarsest > RARE else "paper"
    if kwargs.kmeans.backend != "auto":
        settled_backend(kwargs.kmeans.backend, "cuda" if torch.cuda.is_available() else "cpu")
    return cfg


def settled_backend(name: str, device: torch.device | str) -> str:
    """The k-means backend that ``name`` means on a device.

    Raises:
        ConfigError: it is not there.
    """
    try:
        return resolve_backend(name, device, sharded=distributed.world_size() > 1)
    except ConfigError as error:
        key = "method_kwargs.kmeans.backend"
        raise ConfigError(key, error.value, error.problem, error.remedy) from None


def kept_backend(cfg: DictConfig, kept: str, device: torch.device) -> str:
    """The k-means backend of a run: what the config names, else the one it has run with.

    Args:
        cfg: the config.
        kept: that of the checkpoint, empty where there is none.
        device: where the features are.

    Raises:
        ConfigError: the config names one that is not there.
    """
    named = cfg.method_kwargs.kmeans.backend
    if named != "auto" or not kept:
        return settled_backend(named, device)
    try:
        return settled_backend(kept, device)
    except ConfigError as error:
        taken = settled_backend("auto", device)
        logger.warning(f"k-means backend of this run, {kept!r}: {error.problem}; taking {taken!r}")
        return taken


def report_settings(cfg: DictConfig, backend: str) -> None:
    """Says what was decided for the user, and what will not do what they may think."""
    kwargs = cfg.method_kwargs
    if not kwargs.proto_weight:
        return
    negatives = "all prototypes are negatives"
    if kwargs.num_negatives is not None:
        negatives = (
            f"{kwargs.num_negatives} prototypes are drawn as negatives, collisions: "
            f"{kwargs.collisions} (batch {cfg.optimizer.batch_size}, {min(kwargs.num_prototypes)} "
            "prototypes at the coarsest)"
        )
    logger.info(f"{cfg.method}: k-means by {backend}; {negatives}")
    if kwargs.warmup_epochs >= cfg.max_epochs:
        logger.warning(
            f"method_kwargs.warmup_epochs={kwargs.warmup_epochs} of max_epochs={cfg.max_epochs}: "
            "the prototypes will never be used"
        )


def check_size(cfg: DictConfig, num_samples: int) -> None:
    """Refuses more prototypes than samples.

    Raises:
        ConfigError: with both numbers.
    """
    largest = max(cfg.method_kwargs.num_prototypes)
    if not cfg.method_kwargs.proto_weight:
        return
    if largest > num_samples:
        raise ConfigError(
            "method_kwargs.num_prototypes",
            list(cfg.method_kwargs.num_prototypes),
            f"the training set has {num_samples} images",
            f"allowed: numbers up to {num_samples}",
        )
