"""Settings of metric learning."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Literal

from omegaconf import DictConfig

from solo_ext.config.types import NonNegativeFloat, PositiveInt, method_kwargs
from solo_ext.core.errors import ConfigError
from solo_ext.methods.data_sizes import clusters, fill_from_data
from solo_ext.methods.e_step import (
    PUBLISHED_CLUSTERS,
    EStepKwargs,
    check_e_step,
    check_prototypes,
)
from solo_ext.methods.metric_criteria import OfMargins, OfProxies
from solo_ext.methods.metric_losses import check_loss_kwargs, kind_of
from solo_ext.methods.registry import require_indices

CLUSTERS = "method_kwargs.clusters"
"""Where the settings of the E-step stand in the config."""


@method_kwargs
class MetricKwargs:
    """``method_kwargs`` of :class:`solo_ext.methods.Metric`.

    Attributes:
        loss: a registered loss by name, or ``pml/`` and a loss of pytorch-metric-learning.
        loss_kwargs: its hyper-parameters.
        classes: what counts as one class: ``instance``: the crops of an image; ``label``: the
            data's labels; ``cluster``: clusters of the embeddings, refreshed between epochs.
        normalize: whether embeddings are unit rows to losses that take them as they are; null:
            but for those to which their length means something (N-pair, SphereFace, the bilinear
            critic).
        mining: of triplets' negatives.
        uniformity_weight: of the uniformity of the embeddings beside the loss; with
            ``alignment_loss_func`` the loss of Wang and Isola.
        proj_hidden_dim: width of the projector's hidden layers.
        proj_output_dim: D of the embeddings.
        proj_layers: linear layers of the projector.
        proj_batch_norm: batch norm after its hidden layers.
        clusters: as :class:`solo_ext.methods.e_step.EStepKwargs`, one granularity; null is
            the coarsest of its three. During its warm-up epochs classes are instances.
    """

    SYNONYMS: ClassVar = {"temperature": "loss_kwargs.temperature"}
    """Of solo-learn's methods."""

    loss: str
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    classes: Literal["instance", "label", "cluster"] = "instance"
    normalize: bool | None = None
    mining: Literal["semi_hard", "hard", "random"] = "semi_hard"
    uniformity_weight: NonNegativeFloat = 0.0
    proj_hidden_dim: PositiveInt = 2048
    proj_output_dim: PositiveInt = 128
    proj_layers: PositiveInt = 2
    proj_batch_norm: bool = True
    clusters: EStepKwargs = EStepKwargs(warmup_epochs=0)


def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
    """Gives clusters that are needed and have no number one that suits the training set.

    Args:
        cfg: the config, ``method_kwargs`` filled in.
        images: training images; by default they are counted if need be.
    """
    if cfg.method_kwargs.classes == "cluster":
        coarsest = {"clusters.num_prototypes": clusters(PUBLISHED_CLUSTERS[0])}
        fill_from_data(cfg, coarsest, images)


def validate(cfg: DictConfig) -> DictConfig:
    """Checks what the settings need of each other and of the data.

    Raises:
        ConfigError: naming the first that does not fit.
    """
    kwargs = cfg.method_kwargs
    kind, _ = kind_of(kwargs.loss)
    check_loss_kwargs(kwargs.loss, dict(kwargs.loss_kwargs))
    if not kind.uses_classes and kwargs.classes != "instance":
        raise ConfigError(
            "method_kwargs.classes",
            kwargs.classes,
            f"{kwargs.loss} compares the crops of an image, whatever its class",
            "take instance, or a loss of classes",
        )
    if issubclass(kind, OfProxies) and kwargs.classes != "label":
        raise ConfigError(
            "method_kwargs.classes",
            kwargs.classes,
            f"{kwargs.loss} learns weights of classes, which cannot follow clusters or images",
            "take label, or arcface_loss_func, cosface_loss_func or sphereface_loss_func",
        )
    if kind is OfMargins and kwargs.classes == "instance":
        raise ConfigError(
            "method_kwargs.classes",
            kwargs.classes,
            f"{kwargs.loss} learns a weight per class, which an image is too small for",
            "take label or cluster",
        )
    if kwargs.classes == "label":
        _require_labels(cfg)
    if kwargs.classes == "instance" and kind.uses_classes:
        require_indices(cfg, "tells images apart")
    if kwargs.classes == "cluster":
        _settle_clusters(cfg, kind)
    return cfg


def _require_labels(cfg: DictConfig) -> None:
    problem = None
    if cfg.data.get("no_labels"):
        problem = "data.no_labels is true"
    elif cfg.data.dataset == "stl10":
        problem = "most images that stl10 trains on have none"
    if problem is not None:
        raise ConfigError("method_kwargs.classes", "label", problem, "take instance or cluster")


def _settle_clusters(cfg: DictConfig, kind: type[Any]) -> None:
    settings = cfg.method_kwargs.clusters
    require_indices(cfg, "looks clusters up")
    check_e_step(settings, CLUSTERS)
    if len(settings.num_prototypes) > 1:
        raise ConfigError(
            f"{CLUSTERS}.num_prototypes",
            list(settings.num_prototypes),
            "an image has one class",
            "give one number",
        )
    if kind is OfMargins and settings.warmup_epochs:
        raise ConfigError(
            f"{CLUSTERS}.warmup_epochs",
            settings.warmup_epochs,
            f"{cfg.method_kwargs.loss} needs classes from the first epoch on",
            "take 0",
        )


def check_size(cfg: DictConfig, num_samples: int) -> None:
    """Refuses more clusters than samples.

    Raises:
        ConfigError: with both numbers.
    """
    if cfg.method_kwargs.classes == "cluster":
        check_prototypes(cfg.method_kwargs.clusters, CLUSTERS, num_samples)
