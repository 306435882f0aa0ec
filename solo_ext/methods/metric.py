"""Deep metric learning with instances, labels or clusters as classes.

Any loss of pairs, triplets or classes (see :mod:`solo_ext.methods.metric_criteria` for which) on
the crops of a batch. One step::

    z = g(f(x)) of every crop, unit rows unless the loss uses their length       Metric.compare
    c = the image's index, its label, or its cluster
    loss = criterion(z, c) + uniformity_weight * uniformity(z)

With ``classes: cluster``, k-means of all embeddings precedes an epoch, and each class weight moves
to the new cluster that matches its old one (Metric.on_train_epoch_start).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.core.types import NonNegativeFloat
from solo_ext.host import BaseMethod
from solo_ext.kernels.normalized import normalized
from solo_ext.losses import uniformity_loss_func
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.e_step import (
    CLUSTERS,
    PUBLISHED_CLUSTERS,
    EStep,
    EStepKwargs,
    check_e_step,
    check_prototypes,
)
from solo_ext.methods.metric_criteria import (
    OF_LENGTH,
    Batch,
    Criterion,
    MarginCriterion,
    build_criterion,
    check_loss_kwargs,
    criterion_of,
)
from solo_ext.methods.projected import ProjectedMethod, ProjectorKwargs
from solo_ext.methods.registry import (
    METHODS,
    fill_from_data,
    fill_method_kwargs,
    require_indices,
    require_two_views,
    scaled_clusters,
    typed_kwargs,
)


class MetricKwargs(ProjectorKwargs):
    """``method_kwargs`` of :class:`Metric`, beside the projector's.

    Attributes:
        loss: a registered loss by name, or ``pml/`` and a loss of pytorch-metric-learning.
        loss_kwargs: the loss's hyper-parameters.
        classes: what counts as one class: ``instance``: the crops of an image; ``label``: the
            data's labels; ``cluster``: clusters of the embeddings, refreshed between epochs.
        normalize: whether embeddings are scaled to unit length before the loss, which may do so
            itself; null: yes, except for losses that use the length (N-pair, SphereFace, the
            bilinear critic).
        mining: how negatives of triplets are chosen.
        uniformity_weight: weight of the embeddings' uniformity beside the loss; with
            ``alignment_loss_func`` the sum is the loss of Wang and Isola.
        clusters: as :class:`solo_ext.methods.e_step.EStepKwargs`, with one granularity; null: the
            coarsest of PCL's three. During the warm-up epochs each image is a class.

    Example:
        >>> MetricKwargs(loss="arcface_loss_func", classes="label").mining
        'semi_hard'
    """

    SYNONYMS: ClassVar = {"temperature": "loss_kwargs.temperature"}
    """solo-learn's name of this setting."""

    loss: str
    loss_kwargs: dict[str, Any] = {}
    classes: Literal["instance", "label", "cluster"] = "instance"
    normalize: bool | None = None
    mining: Literal["semi_hard", "hard", "random"] = "semi_hard"
    uniformity_weight: NonNegativeFloat = 0.0
    clusters: EStepKwargs = EStepKwargs(warmup_epochs=0)


@METHODS.register("metric")
class Metric(ProjectedMethod):
    """Trains any registered metric loss on the crops of a batch.

    Logs ``train_metric_loss``; for margin losses ``train_class_weight_acc``, the share of crops
    nearest to their own class's weights; for triplets ``train_mined_similarity``, the cosine of
    anchors and mined negatives; the geometry of :class:`ProjectedMethod`; with clusters
    ``e_step/...`` as :meth:`solo_ext.methods.e_step.EStep.run` says.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`MetricKwargs`.

    Example:
        >>> from solo_ext.methods.registry import example_config
        >>> method = Metric(example_config("metric", loss="triplet_loss_func"))
        >>> z = [method(torch.randn(4, 3, 32, 32))["z"] for _ in range(2)]
        >>> images, labels = torch.arange(4), torch.tensor([0, 1, 2, 0])
        >>> loss, metrics = method.compare(z, images, labels)
        >>> z[0].shape, loss.shape, list(metrics)
        (torch.Size([4, 128]), torch.Size([]), ['train_mined_similarity'])
    """

    kwargs_type = MetricKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.kwargs = kwargs = typed_kwargs(self.cfg.method_kwargs, MetricKwargs)
        dim = kwargs.proj_output_dim
        self.projector = self._new_projector(kwargs)
        clustered = kwargs.classes == "cluster"
        self.e_step = EStep(kwargs.clusters if clustered else None, CLUSTERS, dim)
        self.prototypes, self.bank = self.e_step.prototypes, self.e_step.bank
        num_classes = self.prototypes.num_prototypes[0] if clustered else self.num_classes
        batch = Batch(self.num_large_crops, num_classes, dim, kwargs.mining)
        self.criterion = build_criterion(kwargs.loss, kwargs.loss_kwargs, batch)
        keep_out_of_broadcast(self)

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do.

        Raises:
            ConfigError: a setting is out of range, or does not fit the others or the data.
        """
        cfg = BaseMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg, small=True)
        cfg = fill_method_kwargs(cfg, MetricKwargs)
        Metric.fill_sizes(cfg)
        kwargs, e_step = cfg.method_kwargs, cfg.method_kwargs.clusters
        kind = criterion_of(kwargs.loss)
        check_loss_kwargs(kwargs.loss, dict(kwargs.loss_kwargs))
        _check_classes(cfg, kind)
        if kwargs.classes == "instance" and len(kind.classes) > 1:
            require_indices(cfg, "tells images apart")
        if kwargs.classes != "cluster":
            return cfg
        require_indices(cfg, "looks clusters up")
        check_e_step(e_step, CLUSTERS)
        if len(e_step.num_prototypes) > 1:
            raise ConfigError(
                f"{CLUSTERS}.num_prototypes",
                list(e_step.num_prototypes),
                "an image has one class",
                "give one number",
            )
        if issubclass(kind, MarginCriterion) and e_step.warmup_epochs:
            raise ConfigError(
                f"{CLUSTERS}.warmup_epochs",
                e_step.warmup_epochs,
                f"{kwargs.loss} needs classes from the first epoch on",
                "take 0",
            )
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Sets the number of clusters from the training set if it is needed and null.

        Raises:
            ConfigError: more clusters than images.
        """
        if cfg.method_kwargs.classes == "cluster":
            coarsest = {"clusters.num_prototypes": scaled_clusters(PUBLISHED_CLUSTERS[0])}
            fill_from_data(cfg, coarsest, images)
            if images is not None:
                check_prototypes(cfg.method_kwargs.clusters, CLUSTERS, images)

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the parameters of the criterion."""
        groups = super().learnable_params
        learned = [p for p in self.criterion.parameters() if p.requires_grad]
        return [*groups, {"name": "criterion", "params": learned}] if learned else groups

    @property
    def changes_by_step(self) -> bool:
        """Whether the loss changes from step to step, which no recorded step would."""
        return self.criterion.changes_by_step

    def on_train_start(self) -> None:
        """Prepares the E-step."""
        super().on_train_start()
        self.e_step.start(self)

    def on_train_epoch_start(self) -> None:
        """Runs the E-step if it is due, and matches the class weights to the new clusters."""
        super().on_train_epoch_start()
        # `before` keeps its values, because the E-step replaces `assignments` by a new tensor.
        first, before = self.prototypes.epoch < 0, self.prototypes.assignments
        done = self.e_step.before_epoch(self)
        if done and not first and isinstance(self.criterion, MarginCriterion):
            weights = self.criterion.class_weights
            state = self.optimizers().optimizer.state  # type: ignore[union-attr]
            after = self.prototypes.assignments[0]
            weights.rematch_(before[0], after, state.get(weights.weight))

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The metric loss plus the online classifier's."""
        indices, _, targets = batch
        # z = g(f(x)) of every crop; and the online classifier.
        out = super().training_step(batch, batch_idx)
        self.criterion.step = self.global_step
        loss, metrics = self.compare(out["z"], indices, targets)
        self._step_keys = indices, [z.detach() for z in out["z"][: self.num_large_crops]]
        self.log_step(loss, metrics, out["z"])
        return loss + out["loss"]  # type: ignore[no-any-return]

    def compare(
        self, views: Sequence[Tensor], indices: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss.

        Args:
            views: (N, D) embeddings, one per crop.
            indices: (N,) sample indices.
            targets: (N,) labels.

        Returns:
            Scalar, and what to log.
        """
        kwargs = self.kwargs
        # Before the first E-step each image is a class of its own.
        classes = targets if kwargs.classes == "label" else indices
        if kwargs.classes == "cluster" and self.prototypes.epoch >= 0:
            classes = self.prototypes.assignments_of(indices)[0]
        views = [z.float() if z.dtype != torch.float64 else z for z in views]
        raw = kwargs.loss in OF_LENGTH if kwargs.normalize is None else not kwargs.normalize
        uniform = bool(kwargs.uniformity_weight)
        unit = normalized(torch.stack(views)).unbind() if uniform or not raw else ()
        loss, metrics = self.criterion(views if raw else unit, classes)
        if uniform:
            uniformity = torch.stack([uniformity_loss_func(z) for z in unit]).mean()
            loss = loss + kwargs.uniformity_weight * uniformity
        return loss, metrics

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Writes the step's embeddings into the bank."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        indices, keys = self._step_keys
        self.e_step.update_bank(indices, (F.normalize(z.float(), dim=1) for z in keys))


def _check_classes(cfg: DictConfig, kind: type[Criterion]) -> None:
    """Refuses classes that the loss does not train with, or that the data do not have."""
    kwargs = cfg.method_kwargs
    unlabelled = cfg.data.get("no_labels") or cfg.data.dataset == "stl10"
    allowed = [name for name in kind.classes if not (name == "label" and unlabelled)]
    if kwargs.classes not in allowed:
        raise ConfigError(
            "method_kwargs.classes",
            kwargs.classes,
            "not all images have labels"
            if kwargs.classes in kind.classes
            else f"{kwargs.loss} does not train with them",
            f"allowed: {', '.join(allowed)}",
        )
