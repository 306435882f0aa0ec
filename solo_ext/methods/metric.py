"""Deep metric learning with instances, labels or clusters as classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.host import BaseMethod
from solo_ext.losses import uniformity_loss_func
from solo_ext.memory.features import FeatureBank
from solo_ext.memory.heads import projector
from solo_ext.memory.prototypes import ClusterPrototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.e_step import EStep
from solo_ext.methods.embedding_metrics import embedding_metrics
from solo_ext.methods.metric_criteria import OfMargins
from solo_ext.methods.metric_kwargs import CLUSTERS, MetricKwargs, check_size, fill_sizes, validate
from solo_ext.methods.metric_losses import build_criterion
from solo_ext.methods.metric_report import report_settings
from solo_ext.methods.projected import ProjectedMethod
from solo_ext.methods.registry import METHODS, fill_method_kwargs, require_two_views


@METHODS.register("metric")
class Metric(ProjectedMethod):
    """Trains any registered metric loss on the crops of a batch.

    Logs ``train_metric_loss``; for margin losses ``train_class_weight_acc``, the share of crops
    nearest to their own class's weights; for triplets ``train_mined_similarity``, the cosine of the
    mined negatives; once per epoch ``train_effective_rank``, ``train_alignment`` and
    ``train_uniformity`` of the last batch; with clusters ``e_step/...`` as
    :meth:`solo_ext.methods.e_step.EStep.run` says.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`MetricKwargs`.
    """

    kwargs_type = MetricKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        kwargs = self.cfg.method_kwargs
        dim, clusters = kwargs.proj_output_dim, kwargs.clusters
        self.projector = projector(
            self.features_dim,
            kwargs.proj_hidden_dim,
            dim,
            batch_norm=kwargs.proj_batch_norm,
            layers=kwargs.proj_layers,
        )
        clustered = kwargs.classes == "cluster"
        self.criterion = build_criterion(
            kwargs.loss,
            dict(kwargs.loss_kwargs),
            num_large=self.num_large_crops,
            num_classes=clusters.num_prototypes[0] if clustered else self.num_classes,
            dim=dim,
            mining=kwargs.mining,
        )
        self.prototypes = ClusterPrototypes(clusters.num_prototypes if clustered else (), dim)
        banked = clustered and clusters.e_step == "bank"
        self.bank = FeatureBank(dim) if banked else None
        parts = self.prototypes, self.bank
        self.e_step = EStep(clusters, CLUSTERS, *parts) if clustered else None
        self._written: tuple[Tensor, Tensor] | None = None
        self._last_views: list[Tensor] | None = None
        keep_out_of_broadcast(self)

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = BaseMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg, small=True)
        cfg = fill_method_kwargs(cfg, MetricKwargs)
        fill_sizes(cfg)
        return validate(cfg)

    fill_sizes = staticmethod(fill_sizes)
    check_size = staticmethod(check_size)

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds what the loss learns."""
        groups = super().learnable_params
        learned = [p for p in self.criterion.parameters() if p.requires_grad]
        return [*groups, {"name": "criterion", "params": learned}] if learned else groups

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks whose embeddings are clustered."""
        return [self.backbone, self.projector]

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) that are clustered."""
        z: Tensor = self(X)["z"]
        return z

    def on_train_start(self) -> None:
        """Sizes the state by the training set."""
        super().on_train_start()
        if self.e_step is not None:
            self.e_step.start(self)
        if self.trainer.is_global_zero:
            report_settings(self.cfg)

    def on_train_epoch_start(self) -> None:
        """Runs the E-step where there are clusters and it is due."""
        super().on_train_epoch_start()
        if self.e_step is None or not self.e_step.is_due(self.current_epoch):
            return
        # The E-step puts another tensor in its place.
        before = self.prototypes.assignments if self.prototypes.epoch >= 0 else None
        metrics = self.e_step.run(self)
        if before is not None and isinstance(self.criterion, OfMargins):
            self._rematch(before[0], self.criterion)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)

    def _rematch(self, before: Tensor, criterion: OfMargins) -> None:
        """Gives each cluster the weights of the one that it continues."""
        from solo_ext.clustering.agreement import match_clusters

        weights = criterion.class_weights
        match = match_clusters(before, self.prototypes.assignments[0], len(weights.weight))
        state = self.optimizers().optimizer.state.get(weights.weight)  # type: ignore[union-attr]
        weights.rematch_(match, state)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The metric loss plus the online classifier's."""
        indices, _, targets = batch
        out = super().training_step(batch, batch_idx)
        loss, metrics = self.compare(out["z"], indices, targets)
        keys = [F.normalize(z.detach().float(), dim=1) for z in out["z"][: self.num_large_crops]]
        self._written = indices, F.normalize(torch.stack(keys).mean(0), dim=1)
        self._last_views = [z.detach() for z in out["z"][:2]]
        metrics = {"train_metric_loss": loss, **metrics}
        self.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True)
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
        kwargs = self.cfg.method_kwargs
        classes = {"instance": indices, "label": targets}.get(kwargs.classes, indices)
        if kwargs.classes == "cluster" and self.prototypes.epoch >= 0:
            classes = self.prototypes.assignments[0, indices]
        views = [z.float() if z.dtype != torch.float64 else z for z in views]
        unit = [F.normalize(z, dim=1) for z in views]
        normalize = kwargs.normalize
        if normalize is None:
            normalize = not self.criterion.takes_raw
        loss, metrics = self.criterion(unit if normalize else views, classes)
        if kwargs.uniformity_weight:
            uniformity = torch.stack([uniformity_loss_func(z) for z in unit]).mean()
            loss = loss + kwargs.uniformity_weight * uniformity
        return loss, metrics

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Writes the step's embeddings into the bank."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._written is not None and self.bank is not None:
            self.bank.update_(*(distributed.gather(x) for x in self._written))
        self._written = None

    def on_train_epoch_end(self) -> None:
        """Logs the geometry of the last batch's embeddings."""
        super().on_train_epoch_end()
        if self._last_views is not None:
            self.log_dict(embedding_metrics(*self._last_views), sync_dist=True)
            self._last_views = None
