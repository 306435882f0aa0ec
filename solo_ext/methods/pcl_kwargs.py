"""Settings of prototypical contrastive learning."""

from __future__ import annotations

from typing import Literal

from omegaconf import DictConfig

from solo_ext.config.types import NonNegativeFloat, PositiveFloat, PositiveInt, method_kwargs
from solo_ext.core.errors import ConfigError
from solo_ext.methods.data_sizes import clusters, fill_from_data, queue
from solo_ext.methods.e_step_kwargs import (
    PUBLISHED_CLUSTERS,
    EStepKwargs,
    check_e_step,
    check_prototypes,
    warn_of_late_start,
)
from solo_ext.methods.registry import logger, require_indices

KEY = "method_kwargs"
"""Where the settings of the E-step stand in the config."""
RARE = 0.05
"""Share of anchors with a batch-mate in their cluster up to which `auto` leaves them be."""


@method_kwargs
class PCLKwargs(EStepKwargs):
    """``method_kwargs`` of :class:`solo_ext.methods.PCL`; defaults of the official ImageNet runs.

    Beside those of :class:`solo_ext.methods.e_step_kwargs.EStepKwargs`, whose warm-up epochs are of
    InfoNCE alone:

    Attributes:
        head: ``v1`` is linear, ``v2`` an MLP without batch norm.
        proj_hidden_dim: width of the MLP's hidden layer; null is the width of the features.
        proj_output_dim: D of the embeddings.
        temperature: of InfoNCE, and mean of the concentrations.
        queue_size: number of past embeddings; null: 16,384, up to an eighth of the training images.
        proto_weight: weight of ProtoNCE beside InfoNCE; 0 leaves MoCo, without an E-step.
        num_negatives: prototypes drawn as negatives at every step; null takes all.
        collisions: with drawn negatives, as :func:`solo_ext.losses.proto_nce_loss_func` takes it;
            ``auto`` merges where more than one anchor in twenty can be expected to share its
            cluster with a batch-mate.
        symmetric: each view is query and key in turn; else, as published, the first is the query.
        compute_dtype: of products with queue and prototypes; sums and exponentials stay in fp32.
    """

    head: Literal["v1", "v2"] = "v2"
    proj_hidden_dim: PositiveInt | None = None
    proj_output_dim: PositiveInt = 128
    temperature: PositiveFloat = 0.2
    queue_size: PositiveInt | None = None
    proto_weight: NonNegativeFloat = 1.0
    num_negatives: PositiveInt | None = None
    collisions: Literal["auto", "paper", "merge"] = "auto"
    symmetric: bool = False
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
    """Gives clusters and queue that have no size one that suits the training set.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        images: training images; by default they are counted if need be.
    """
    sizes = {"num_prototypes": clusters(*PUBLISHED_CLUSTERS), "queue_size": queue(16384)}
    fill_from_data(cfg, sizes, images)


def validate(cfg: DictConfig) -> DictConfig:
    """Checks what the settings need of each other and of the data, and decides ``auto``.

    Raises:
        ConfigError: data without sample indices, more drawn negatives than there are, or a k-means
            backend that is not there.
    """
    kwargs = cfg.method_kwargs
    require_indices(cfg, "looks clusters up")
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
    check_e_step(kwargs, KEY)
    return cfg


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
    warn_of_late_start(cfg, kwargs, KEY)


def check_size(cfg: DictConfig, num_samples: int) -> None:
    """Refuses more prototypes than samples.

    Raises:
        ConfigError: with both numbers.
    """
    if cfg.method_kwargs.proto_weight:
        check_prototypes(cfg, cfg.method_kwargs, KEY, num_samples)
