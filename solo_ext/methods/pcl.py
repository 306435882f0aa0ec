"""Prototypical contrastive learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.draws import draw, mix
from solo_ext.host import BaseMomentumMethod, initialize_momentum_params
from solo_ext.losses.contrastive import info_nce_loss_func
from solo_ext.losses.proto_nce import proto_nce_terms
from solo_ext.memory.features import FeatureBank, FeatureQueue
from solo_ext.memory.heads import projector
from solo_ext.memory.prototypes import ClusterPrototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.pcl_kwargs import (
    KEY,
    PCLKwargs,
    check_size,
    fill_sizes,
    report_settings,
    validate,
)
from solo_ext.methods.projected import ProjectedMomentumMethod
from solo_ext.methods.prototype_refresh import (
    e_step_is_due,
    refresh_prototypes,
    start_prototypes,
)
from solo_ext.methods.registry import METHODS, fill_method_kwargs, require_two_views


@METHODS.register(
    "pcl",
    paper="Prototypical Contrastive Learning of Unsupervised Representations",
    year=2020,
    arxiv="2005.04966",
)
class PCL(ProjectedMomentumMethod):
    """MoCo with prototypes of several clusterings (Li et al., ICLR 2021, arXiv 2005.04966).

    ``InfoNCE + proto_weight / M * sum_m ProtoNCE_m`` (Eq. 11). Before an epoch, from
    ``warmup_epochs`` on, the E-step clusters the momentum embeddings of the training set.

    Logs ``train_info_nce_loss``, ``train_proto_nce_loss``, and per granularity
    ``train_proto_acc_<K>``, the share of queries whose own prototype has the largest logit, and
    ``train_collisions_<K>``, the share of those with a batch-mate in their cluster; ``e_step/...``
    as :func:`solo_ext.methods.prototype_refresh.refresh_prototypes` says.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`PCLKwargs`.
    """

    kwargs_type = PCLKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        kwargs = self.cfg.method_kwargs
        self.temperature: float = kwargs.temperature
        self.proto_weight: float = kwargs.proto_weight
        self.symmetric: bool = kwargs.symmetric
        narrow = kwargs.compute_dtype == "bfloat16"
        self._compute_dtype = torch.bfloat16 if narrow else None
        if not self.symmetric:
            # The online backbone is given the first view only.
            self.num_crops = self.num_large_crops = 1
        hidden = (kwargs.proj_hidden_dim or self.features_dim) if kwargs.head == "v2" else 0
        dim = kwargs.proj_output_dim
        self.projector, self.momentum_projector = (
            projector(self.features_dim, hidden, dim, batch_norm=False) for _ in range(2)
        )
        initialize_momentum_params(self.projector, self.momentum_projector)
        views = range(2 if self.symmetric else 1)
        self.queues = nn.ModuleList(FeatureQueue(kwargs.queue_size, dim) for _ in views)
        self.prototypes = ClusterPrototypes(kwargs.num_prototypes, dim)
        banked = kwargs.e_step == "bank" and self.proto_weight > 0
        self.bank = FeatureBank(dim) if banked else None
        self._written: tuple[Tensor, list[Tensor]] | None = None
        self._draw_seed = 0
        keep_out_of_broadcast(self)

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = ProjectedMomentumMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg)
        cfg = fill_method_kwargs(cfg, PCLKwargs)
        fill_sizes(cfg)
        return validate(cfg)

    fill_sizes = staticmethod(fill_sizes)
    check_size = staticmethod(check_size)

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks whose embeddings are clustered."""
        return [self.momentum_backbone, self.momentum_projector]

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) that are clustered."""
        z: Tensor = self.momentum_forward(X)["z"]
        return z

    def on_train_start(self) -> None:
        """Sizes the state by the training set and settles on a k-means backend."""
        super().on_train_start()
        # Random until they are filled, and left out of what DDP brings into line.
        distributed.broadcast_buffers(*self.queues)
        start_prototypes(self, self.cfg.method_kwargs, KEY)
        if self.trainer.is_global_zero:
            report_settings(self.cfg, self.prototypes.backend)

    def on_train_epoch_start(self) -> None:
        """Runs the E-step where it is due."""
        super().on_train_epoch_start()
        settings = self.cfg.method_kwargs
        if not self.proto_weight or not e_step_is_due(self, settings):
            return
        metrics = refresh_prototypes(self, settings, self.temperature)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """InfoNCE, and ProtoNCE after warm-up, plus the online classifier's loss."""
        indices, crops, targets = batch
        if self.symmetric:
            out = super().training_step(batch, batch_idx)
            keys = out["momentum_z"]
        else:
            # Not the momentum method's own step, which sends every view through both networks.
            first = [indices, [crops[0]], targets]
            out = super(BaseMomentumMethod, self).training_step(first, batch_idx)
            keys = [self.momentum_forward(crops[1])["z"]]
        keys = [F.normalize(key.float(), dim=1) for key in keys]
        # Drawn anew at every step and rank, and the same again when it is resumed here.
        place = distributed.rank(), self.current_epoch, batch_idx
        self._draw_seed = mix(self.cfg.get("seed") or 0, *place)
        loss, metrics = self.contrast(out["z"], keys[::-1], indices)
        self._written = (indices, keys)
        self.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True)
        return loss + out["loss"]  # type: ignore[no-any-return]

    def contrast(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], indices: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss, the mean over its directions.

        Args:
            queries: (N, D) each, one per direction.
            keys: (N, D) each, unit rows of the other view.
            indices: (N,) sample indices.

        Returns:
            Scalar, and what to log.
        """
        # The key of a query's direction is of the other view, and so is its queue.
        queues = [cast(FeatureQueue, queue).value for queue in self.queues][::-1]
        pairs = zip(queries, keys, queues, strict=True)
        settings = self.temperature, self._compute_dtype
        info = torch.stack([info_nce_loss_func(*pair, *settings) for pair in pairs]).mean()
        if self.prototypes.epoch < 0 or not self.proto_weight:
            return info, {"train_info_nce_loss": info}
        found = [self._proto_nce(m, queries, indices) for m in range(len(self.prototypes.names))]
        proto = torch.stack([terms["proto_nce_loss"] for terms in found]).mean()
        metrics = {"train_info_nce_loss": info, "train_proto_nce_loss": proto}
        for name, terms in zip(self.prototypes.names, found, strict=True):
            metrics[f"train_proto_acc_{name}"] = terms["acc"]
            metrics[f"train_collisions_{name}"] = terms["collisions"]
        return info + self.proto_weight * proto, metrics

    def _proto_nce(self, m: int, queries: Sequence[Tensor], indices: Tensor) -> dict[str, Tensor]:
        """ProtoNCE at one granularity, the mean over the directions."""
        ids = self.prototypes.assignments[m, indices]
        table = self.prototypes.prototypes[m], self.prototypes.concentration[m]
        drawn = self._draw_negatives(m, ids), self.cfg.method_kwargs.collisions
        views = torch.stack(list(queries))
        terms = proto_nce_terms(views, *table, ids, *drawn, self._compute_dtype)
        shared = (ids.unsqueeze(0) == ids.unsqueeze(1)).sum(1) > 1
        return {
            "proto_nce_loss": terms.loss,
            "acc": terms.accuracy,
            "collisions": shared.float().mean(),
        }

    def _draw_negatives(self, m: int, positives: Tensor) -> Tensor | None:
        """(R,) distinct prototypes that are no positive of the batch, or ``None`` for all."""
        count = self.cfg.method_kwargs.num_negatives
        if count is None:
            return None
        size = self.prototypes.num_prototypes[m]
        lots = draw((size,), self._draw_seed, m, device=positives.device)
        return lots.index_fill_(0, positives, -1.0).topk(count, sorted=False).indices

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Moves the momentum networks, then writes the step's keys into queue and bank."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._written is None:
            return
        indices, keys = self._written
        self._written = None
        keys = [distributed.gather(key) for key in keys]
        for queue, key in zip(self.queues, keys, strict=True):
            cast(FeatureQueue, queue).update_(key)
        if self.bank is not None:
            mean = torch.stack(keys).mean(0)
            self.bank.update_(distributed.gather(indices), F.normalize(mean, dim=1))
