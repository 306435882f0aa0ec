"""The method behind all contrastive ones: positives, negatives, estimate and mixing by config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.data.indexed import training_set
from solo_ext.host import BaseMethod, BaseMomentumMethod, initialize_momentum_params
from solo_ext.losses.contrastive import (
    ContrastiveTerms,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    two_view_terms,
)
from solo_ext.losses.nnclr import nnclr_terms
from solo_ext.memory.features import FeatureBank, FeatureQueue, Neighbours, SupportSet
from solo_ext.memory.heads import projector
from solo_ext.memory.prototypes import ClusterPrototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.contrastive_kwargs import (
    CLUSTERS,
    ContrastiveKwargs,
    check_size,
    fill_sizes,
    validate,
)
from solo_ext.methods.contrastive_metrics import (
    neighbour_metrics,
    queue_metrics,
    term_metrics,
)
from solo_ext.methods.contrastive_report import report_settings
from solo_ext.methods.drawn_mixing import DrawnMixing
from solo_ext.methods.e_step import EStep
from solo_ext.methods.embedding_metrics import embedding_metrics
from solo_ext.methods.projected import ProjectedMomentumMethod
from solo_ext.methods.registry import fill_method_kwargs, has_indices, require_two_views


class Contrastive(BaseMomentumMethod):
    """Contrasts positives with negatives, each of a kind that the config chooses.

    ``-log(exp(s_p) / (exp(s_p) + M))``, s the cosine over the temperature, M the estimated mass of
    the negatives (:class:`solo_ext.losses.NegativeEstimator`): mean over all pairs of a crop and a
    positive from another large crop, or from any other crop where views are contrasted with views
    of the batch. The methods of the papers are presets of it.

    Every crop is an anchor. Negatives of the batch: all crops of the other images, of all
    processes. A queue: one per large crop, of that crop's momentum embeddings, and contrasted
    with the other crops. There is no momentum backbone where negatives are of the batch.

    Logs ``train_<method>_loss``, and as far as they apply ``train_clamped_fraction`` (share of
    anchors on the floor, whose negatives get no gradient), ``train_hardness`` (cosine at
    which all negatives would weigh what they are estimated to), ``train_mined_similarity`` and
    ``train_mixed_similarity`` (cosines of mined negatives and of mixtures), ``train_nn_acc``
    (neighbours of the image's label, where both have one), ``train_nn_similarity``,
    ``train_nn_own`` (neighbours that are the image itself, where the data tell their images apart),
    ``train_queue_filled`` and ``train_queue_age`` (share of rows ever written, mean age of these in
    steps; ``train_support_...`` likewise), and once per epoch ``train_effective_rank``,
    ``train_alignment`` and ``train_uniformity`` of the last batch.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`ContrastiveKwargs`.
    """

    kwargs_type: type[ContrastiveKwargs] = ContrastiveKwargs

    def __init__(self, cfg: DictConfig) -> None:
        cfg = self.add_and_assert_specific_cfg(cfg)
        self._has_momentum = self.uses_momentum(cfg.method_kwargs)
        self._base.__init__(cfg)
        if not self._has_momentum:
            # The base class asks for it all the same.
            self.momentum_classifier = None
        kwargs = self.cfg.method_kwargs
        self.temperature: float = kwargs.temperature
        self.estimator = NegativeEstimator(kwargs.tau_plus, kwargs.beta, kwargs.detach_weights)
        self._build(kwargs)
        self._written: tuple[list[Tensor], Tensor, Tensor] | None = None
        self._last_views: list[Tensor] | None = None
        self._mixing = DrawnMixing(kwargs.mixing)
        keep_out_of_broadcast(self)

    @property
    def _base(self) -> Any:
        """The base class of what is built: without momentum, none of its networks and updates."""
        return super() if self._has_momentum else super(BaseMomentumMethod, self)

    def _build(self, kwargs: Any) -> None:
        dim = self._dim
        self.projector = self._new_projector()
        self.predictor = (
            projector(dim, kwargs.pred_hidden_dim, dim) if kwargs.pred_hidden_dim else None
        )
        if self._has_momentum:
            self.momentum_projector = self._new_projector()
            initialize_momentum_params(self.projector, self.momentum_projector)
        large = range(self.num_large_crops)
        sizes = [kwargs.queue_size for _ in large] if kwargs.negatives == "queue" else []
        self.queues = nn.ModuleList(FeatureQueue(size, dim) for size in sizes)
        near, clustered = (kwargs.positives == n for n in ("nearest_neighbor", "prototype"))
        self.support_set = SupportSet(kwargs.support_set.size, dim) if near else None
        clusters = kwargs.clusters
        # Of no use, but with a name, where there are none.
        self.prototypes = ClusterPrototypes(clusters.num_prototypes if clustered else (), dim)
        banked = clustered and clusters.e_step == "bank"
        self.bank = FeatureBank(dim) if banked else None
        parts = self.prototypes, self.bank, self.temperature
        self.e_step = EStep(clusters, CLUSTERS, *parts) if clustered else None

    @property
    def _dim(self) -> int:
        return int(self.cfg.method_kwargs.proj_output_dim)

    def _new_projector(self) -> nn.Module:
        kwargs = self.cfg.method_kwargs
        return projector(
            self.features_dim,
            kwargs.proj_hidden_dim,
            kwargs.proj_output_dim,
            batch_norm=kwargs.proj_batch_norm,
            layers=kwargs.proj_layers,
            last_batch_norm=kwargs.proj_last_batch_norm,
        )

    @staticmethod
    def uses_momentum(kwargs: Any) -> bool:
        """Whether ``method_kwargs`` ask for a momentum backbone."""
        settings = kwargs if isinstance(kwargs, dict) else dict(kwargs)
        return bool(settings["negatives"] == "queue")

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = fill_method_kwargs(BaseMethod.add_and_assert_specific_cfg(cfg), cls.kwargs_type)
        if cls.uses_momentum(cfg.method_kwargs):
            cfg = ProjectedMomentumMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg, small=True)
        cls.fill_sizes(cfg)
        return validate(cfg)

    fill_sizes = staticmethod(fill_sizes)
    check_size = staticmethod(check_size)

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the heads."""
        heads = {"projector": self.projector, "predictor": self.predictor}
        return [
            *super().learnable_params,
            *({"name": n, "params": h.parameters()} for n, h in heads.items() if h is not None),
        ]

    @property
    def momentum_pairs(self) -> list[tuple[Any, Any]]:
        """Adds the projectors."""
        return [*super().momentum_pairs, (self.projector, self.momentum_projector)]

    def _embedded(self, out: dict[str, Any]) -> dict[str, Any]:
        z = self.projector(out["feats"])
        return (
            {**out, "z": z} if self.predictor is None else {**out, "z": z, "p": self.predictor(z)}
        )

    def forward(self, X: Tensor) -> dict[str, Any]:
        """Adds the embeddings ``z`` (N, D), and their predictions ``p`` if there is a predictor."""
        return self._embedded(super().forward(X))

    def multicrop_forward(self, X: Tensor) -> dict[str, Any]:
        """As :meth:`forward`, of a small crop."""
        return self._embedded(super().multicrop_forward(X))

    @torch.no_grad()
    def momentum_forward(self, X: Tensor) -> dict[str, Any]:
        """Adds the embeddings ``z`` (N, D)."""
        out: dict[str, Any] = super().momentum_forward(X)
        return {**out, "z": self.momentum_projector(out["feats"])}

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks whose embeddings are clustered."""
        if self._has_momentum:
            return [self.momentum_backbone, self.momentum_projector]
        return [self.backbone, self.projector]

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) that are clustered."""
        if self._has_momentum:
            return self.momentum_forward(X)["z"]  # type: ignore[no-any-return]
        # Not this class's own forward pass, whose predictor would take statistics of the images.
        return self.projector(super().forward(X)["feats"])  # type: ignore[no-any-return]

    def on_train_start(self) -> None:
        """Sizes the state by the training set."""
        self._base.on_train_start()
        # Random until they are filled, and left out of what DDP brings into line.
        distributed.broadcast_buffers(*self.queues, *filter(None, [self.support_set]))
        if self.e_step is not None:
            self.e_step.start(self)
        if self.trainer.is_global_zero:
            # A data set of one's own that nothing needs to know more of may be of any kind.
            known = self.support_set is not None
            size = len(training_set(self.trainer, self.cfg)) if known else None
            report_settings(self.cfg, self.kwargs_type, size)

    def on_train_epoch_start(self) -> None:
        """Runs the E-step where there are prototypes and it is due."""
        self._base.on_train_epoch_start()
        if self.e_step is not None and self.e_step.is_due(self.current_epoch):
            metrics = self.e_step.run(self)
            self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The contrastive loss plus the online classifier's."""
        indices, _, targets = batch
        out = self._base.training_step(batch, batch_idx)
        large = out["momentum_z"] if self._has_momentum else out["z"][: self.num_large_crops]
        keys = [F.normalize(z.detach().float(), dim=1) for z in large]
        self._mixing.begin(self.cfg.get("seed") or 0, self.current_epoch, batch_idx)
        loss, metrics = self.contrast(out.get("p", out["z"]), keys, indices, targets)
        self._written = keys, indices, targets
        self._last_views = [z.detach() for z in out["z"][:2]]
        metrics = {f"train_{self.cfg.method}_loss": loss, **metrics}
        self.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True)
        return loss + out["loss"]  # type: ignore[no-any-return]

    def contrast(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        indices: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss, the mean over its directions.

        Args:
            queries: (N, D) each, one per crop: predictions, or embeddings without a predictor.
            keys: (N, D) unit rows, one per large crop: embeddings without gradient, of the momentum
                encoder where there is one.
            indices: (N,) sample indices.
            targets: (N,) labels, for metrics alone.

        Returns:
            Scalar, and what to log.
        """
        kwargs = self.cfg.method_kwargs
        metrics: dict[str, Tensor] = {}
        positives: list[Tensor] | None = None
        if self.support_set is not None:
            found = self._neighbours(keys, indices)
            labels = None if self.cfg.data.get("no_labels") else targets
            ids = indices if has_indices(self.cfg) else None
            metrics |= neighbour_metrics(found, self.support_set, ids, labels)
            positives = list(found.embeddings.chunk(len(keys)))
        elif kwargs.positives == "prototype" and self.prototypes.epoch >= 0:
            positives = [self._prototypes_of(indices)] * len(keys)
        if kwargs.negatives == "queue":
            terms = self._against_queues(queries, keys, positives)
        elif self.support_set is not None:
            assert positives is not None
            terms = self._neighbours_against_batch(queries, positives)
        else:
            terms = [self._against_batch(queries, positives)]
        loss = torch.stack([t.loss for t in terms]).mean()
        if len(self.queues):
            metrics |= queue_metrics("queue", cast(FeatureQueue, self.queues[0]))
        debiased = self.estimator.tau_plus > 0
        return loss, metrics | term_metrics(
            terms, debiased=debiased, mixing=self._mixing.active(self.current_epoch)
        )

    def _against_batch(
        self, queries: Sequence[Tensor], positives: list[Tensor] | None
    ) -> ContrastiveTerms:
        mixes = self._mixing.active(self.current_epoch)
        if positives is None and len(queries) == 2 and not mixes:
            return two_view_terms(queries[0], queries[1], self.temperature, self.estimator)
        batch = batch_of_views(queries)
        if positives is not None:
            batch = batch._replace(positives=positives[0].repeat(len(queries), 1, 1))
        return self._core(batch.anchors, batch.positives, batch.candidates, batch.excluded_columns)

    def _neighbours_against_batch(
        self, queries: Sequence[Tensor], neighbours: list[Tensor]
    ) -> list[ContrastiveTerms]:
        """Neighbours of each large crop with the predictions of every other crop."""
        unit = [F.normalize(q.float(), dim=1) for q in queries]
        # Once each, for they meet again in every direction.
        all_queries = [distributed.gather_with_gradient(q) for q in unit]
        all_near = [distributed.gather(near) for near in neighbours]
        terms = []
        for u, near in enumerate(neighbours):
            for v, query in enumerate(unit):
                if v == u:
                    continue
                for k in range(near.shape[1]):
                    loss, rows = nnclr_terms(
                        near[:, k],
                        query,
                        self.temperature,
                        self.cfg.method_kwargs.symmetric,
                        self.estimator,
                        self._mixing.draw(self.current_epoch, len(all_queries[v]) - 1, query),
                        joined=(all_near[u][:, k], all_queries[v]),
                    )
                    terms.append(rows._replace(loss=loss))
        return terms

    def _against_queues(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], positives: list[Tensor] | None
    ) -> list[ContrastiveTerms]:
        """Every crop with the positives of each other large crop, against that crop's queue."""
        unit = [F.normalize(q.float(), dim=1) for q in queries]
        terms = []
        for u, key in enumerate(keys):
            others = [q for v, q in enumerate(unit) if v != u]
            own = key.unsqueeze(1) if positives is None else positives[u]
            repeated = own.repeat(len(others), 1, 1)
            queue = cast(FeatureQueue, self.queues[u]).value
            terms.append(self._core(torch.cat(others), repeated, queue))
        return terms

    def _core(
        self,
        anchors: Tensor,
        positives: Tensor,
        candidates: Tensor,
        excluded_columns: Tensor | None = None,
    ) -> ContrastiveTerms:
        narrow = self.cfg.method_kwargs.compute_dtype == "bfloat16"
        available = len(candidates) - (0 if excluded_columns is None else excluded_columns.shape[1])
        return contrastive(
            anchors,
            positives,
            candidates,
            excluded_columns=excluded_columns,
            estimator=self.estimator,
            mixing=self._mixing.draw(self.current_epoch, available, anchors),
            temperature=self.temperature,
            compute_dtype=torch.bfloat16 if narrow else None,
        )

    def _neighbours(self, keys: Sequence[Tensor], indices: Tensor) -> Neighbours:
        """Neighbours of all large crops, looked up together."""
        settings = self.cfg.method_kwargs.support_set
        ids = indices.repeat(len(keys)) if settings.exclude_own else None
        assert self.support_set is not None
        return self.support_set.nearest(torch.cat(list(keys)), settings.top_k, ids)

    def _prototypes_of(self, indices: Tensor) -> Tensor:
        """(N, M, D) the prototypes of some samples, one per granularity."""
        ids = self.prototypes.assignments[:, indices]
        pairs = zip(self.prototypes.prototypes, ids, strict=True)
        return torch.stack([table[own] for table, own in pairs], dim=1)

    def validation_step(
        self, batch: Sequence[Tensor], batch_idx: int, *more: Any, **named: Any
    ) -> dict[str, Any]:
        """As the base class, of momentum networks where there are any."""
        return self._base.validation_step(batch, batch_idx, *more, **named)  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Moves the momentum networks, then writes the step's keys into all tables."""
        self._base.on_train_batch_end(outputs, batch, batch_idx)
        if self._written is None:
            return
        keys, indices, targets = self._written
        self._written = None
        support, bank = self.support_set, self.bank
        if len(self.queues):
            for queue, key in zip(self.queues, keys, strict=True):
                cast(FeatureQueue, queue).update_(distributed.gather(key))
        if support is not None:
            first = distributed.gather(keys[0])
            support.update_(first, distributed.gather(indices), distributed.gather(targets))
        if bank is not None:
            mean = F.normalize(torch.stack(keys).mean(0), dim=1)
            bank.update_(distributed.gather(indices), distributed.gather(mean))

    def on_train_epoch_end(self) -> None:
        """Logs the geometry of the last batch's embeddings."""
        self._base.on_train_epoch_end()
        if self._last_views is not None:
            self.log_dict(embedding_metrics(*self._last_views), sync_dist=True)
            self._last_views = None
