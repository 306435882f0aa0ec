"""Contrastive learning: positives, negatives, their weighting and mixing are set by config.

``L = mean -log(exp(s_p) / (exp(s_p) + M))``, s the cosine over the temperature T, over anchors and
their positives p. One step, and where it stands::

    z = g(f(x)) of every crop; q = h(z) with a predictor, else z       forward
    k = z of the large crops, without gradient; with a queue that
        of the momentum networks (MoCo)                                _keys
    p = the image's other views (SimCLR), NN(k, Q) (NNCLR, Eq. 4),
        or the prototypes of the image's clusters                      positives_of
    n = the batch (SimCLR), or a queue of past k (MoCo, Eq. 1)         against_negatives
      + mixtures of the hardest of them (MoCHi, Eq. 4 and 5)           DrawnMixing
    M = N max((R - tau_plus P) / (1 - tau_plus), exp(-1 / T)),         NegativeEstimator
        R the mean of exp(s_n), P of exp(s_p), with weights
        exp(beta s) (debiased, Eq. 7 and 8; hard negatives, Eq. 4)
    theta_k <- tau theta_k + (1 - tau) theta_q (MoCo, Eq. 2)           on_train_batch_end
    queue, Q <- k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.host import BaseMethod, initialize_momentum_params
from solo_ext.losses.contrastive import (
    ContrastiveTerms,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    two_view_terms,
)
from solo_ext.losses.nnclr import nnclr_terms
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank, FeatureQueue, SupportSet
from solo_ext.memory.heads import projector
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.contrastive_kwargs import (
    CLUSTERS,
    ContrastiveKwargs,
    check_size,
    fill_sizes,
    validate,
)
from solo_ext.methods.e_step import EStep, warn_of_late_start
from solo_ext.methods.negatives import DrawnMixing, queue_metrics, term_metrics
from solo_ext.methods.projected import ProjectedMethod, ProjectedMomentumMethod
from solo_ext.methods.registry import (
    fill_method_kwargs,
    has_indices,
    logger,
    require_two_views,
    typed_kwargs,
    warn_of_clamping,
)


@dataclass(frozen=True)
class Preset:
    """A contrastive method by name; it differs from the others in its defaults only.

    Called with solo-learn main's config it gives the module: :class:`Contrastive`, or with
    ``negatives: queue`` :class:`QueueContrastive`. There are two because solo-learn's base class of
    momentum methods always has a momentum backbone, which a batch of negatives has no use for.

    Attributes:
        kwargs_type: its ``method_kwargs``.

    Example:
        >>> from solo_ext.methods import Debiased
        >>> from solo_ext.methods.registry import example_config
        >>> method = Debiased(example_config("debiased", tau_plus=0.01))
        >>> views = [torch.randn(4, 3, 32, 32) for _ in range(2)]
        >>> z = [method(view)["z"] for view in views]
        >>> z[0].shape
        torch.Size([4, 128])
        >>> keys, images = [F.normalize(z.detach(), dim=1) for z in z], torch.arange(4)
        >>> loss, metrics = method.contrast(z, keys, indices=images, targets=images % 3)
        >>> loss.shape, sorted(metrics)
        (torch.Size([]), ['train_clamped_fraction', 'train_hardness'])
    """

    kwargs_type: type[ContrastiveKwargs]

    fill_sizes = staticmethod(fill_sizes)
    check_size = staticmethod(check_size)

    def __call__(self, cfg: DictConfig) -> Contrastive:
        """The module of a config, which is checked and filled in."""
        cfg = self.add_and_assert_specific_cfg(cfg)
        return self._kind(cfg)(cfg, self.kwargs_type)

    def load_from_checkpoint(self, path: str | Path, *, cfg: DictConfig, **given: Any) -> Any:
        """Stands in for Lightning's classmethod of this name, which solo-learn's scripts call."""
        given |= {"cfg": self.add_and_assert_specific_cfg(cfg), "kwargs_type": self.kwargs_type}
        return self._kind(cfg).load_from_checkpoint(path, **given)

    def add_and_assert_specific_cfg(self, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = fill_method_kwargs(BaseMethod.add_and_assert_specific_cfg(cfg), self.kwargs_type)
        if self.uses_momentum(cfg.method_kwargs):
            cfg = QueueContrastive.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg, small=True)
        fill_sizes(cfg)
        return validate(cfg)

    def _kind(self, cfg: DictConfig) -> type[Contrastive]:
        return QueueContrastive if self.uses_momentum(cfg.method_kwargs) else Contrastive

    def uses_momentum(self, kwargs: Any) -> bool:
        """Whether ``method_kwargs`` ask for a momentum backbone."""
        return bool(kwargs.negatives == "queue")


class Contrastive(ProjectedMethod):
    """Contrasts positives of the configured kind with the other images of the batch.

    Every crop is an anchor; negatives are all crops of the other images, of all processes.

    Logs ``train_<method>_loss``, the geometry of :class:`ProjectedMethod`, and what applies of
    docs/contrastive.md, "What to watch".

    Args:
        cfg: checked and filled in by :class:`Preset`.
        kwargs_type: class of its settings.
    """

    def __init__(self, cfg: DictConfig, kwargs_type: type[ContrastiveKwargs]) -> None:
        super().__init__(cfg)
        self.kwargs = kwargs = typed_kwargs(self.cfg.method_kwargs, kwargs_type)
        dim = kwargs.proj_output_dim
        self.estimator = NegativeEstimator(kwargs.tau_plus, kwargs.beta, kwargs.detach_weights)
        self.projector = self._new_projector()
        hidden = kwargs.pred_hidden_dim
        self.predictor = projector(dim, hidden, dim) if hidden else None
        self.queues: Any = nn.ModuleList()
        self._build_momentum()
        near = kwargs.positives == "nearest_neighbor"
        self.support_set = SupportSet(kwargs.support_set.size or 0, dim) if near else None
        clustered = kwargs.positives == "prototype"
        # Empty placeholder where nothing is clustered, so that `self.prototypes` always exists.
        num_prototypes = (kwargs.clusters.num_prototypes or ()) if clustered else ()
        self.prototypes = ClusterPrototypes(num_prototypes, dim)
        banked = clustered and kwargs.clusters.e_step == "bank"
        self.bank = FeatureBank(dim) if banked else None
        parts = kwargs.clusters, CLUSTERS, self.prototypes, self.bank, kwargs.temperature
        self.e_step = EStep(*parts) if clustered else None
        self._mixing = DrawnMixing(kwargs.mixing)
        self._written: tuple[list[Tensor], Tensor, Tensor] | None = None
        keep_out_of_broadcast(self)

    def _build_momentum(self) -> None:
        """Nothing here; see :class:`QueueContrastive`."""

    def _new_projector(self) -> nn.Module:
        kwargs = self.kwargs
        return projector(
            self.features_dim,
            kwargs.proj_hidden_dim,
            kwargs.proj_output_dim,
            batch_norm=kwargs.proj_batch_norm,
            layers=kwargs.proj_layers,
            last_batch_norm=kwargs.proj_last_batch_norm,
        )

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the predictor."""
        h = self.predictor
        more = [] if h is None else [{"name": "predictor", "params": h.parameters()}]
        return [*super().learnable_params, *more]

    def _predicted(self, out: dict[str, Any]) -> dict[str, Any]:
        """Adds q, the predictions, where there is a predictor; else q is z."""
        return {**out, "q": out["z"] if self.predictor is None else self.predictor(out["z"])}

    def forward(self, X: Tensor) -> dict[str, Any]:
        """Adds the embeddings ``z`` (N, D), and the queries ``q`` (N, D)."""
        return self._predicted(super().forward(X))

    def multicrop_forward(self, X: Tensor) -> dict[str, Any]:
        """As :meth:`forward`, of a small crop."""
        return self._predicted(super().multicrop_forward(X))

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The contrastive loss plus the online classifier's."""
        indices, _, targets = batch
        # z = g(f(x)), q = h(z) of every crop; and the online classifier.
        out = super().training_step(batch, batch_idx)
        # k: unit rows of the large crops, without gradient.
        keys = [F.normalize(z.detach().float(), dim=1) for z in self._keys(out)]
        self._mixing.begin(self.cfg.get("seed") or 0, self.current_epoch, batch_idx)
        loss, metrics = self.contrast(out["q"], keys, indices, targets)
        self._written = keys, indices, targets
        self.keep_for_geometry(out["z"])
        metrics = {f"train_{self.cfg.method}_loss": loss, **metrics}
        self.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True)
        return loss + out["loss"]  # type: ignore[no-any-return]

    def _keys(self, out: dict[str, Any]) -> list[Tensor]:
        return out["z"][: self.num_large_crops]  # type: ignore[no-any-return]

    def contrast(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], indices: Tensor, targets: Tensor
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
        positives, metrics = self.positives_of(keys, indices, targets)
        terms = self.against_negatives(queries, keys, positives)
        loss = torch.stack([t.loss for t in terms]).mean()
        for queue in self.queues[:1]:
            metrics |= queue_metrics("queue", queue)
        debiased, mixing = self.kwargs.tau_plus > 0, self._mixing.active(self.current_epoch)
        return loss, metrics | term_metrics(terms, debiased=debiased, mixing=mixing)

    def positives_of(
        self, keys: Sequence[Tensor], indices: Tensor, targets: Tensor
    ) -> tuple[list[Tensor] | None, dict[str, Tensor]]:
        """(N, P, D) positives that stand for each large crop, and what to log of them.

        ``None`` where the views stand for themselves: also before the first E-step.
        """
        if self.support_set is not None:
            return self._neighbours(self.support_set, keys, indices, targets)
        if self.prototypes.epoch < 0:
            return None, {}
        ids = self.prototypes.assignments[:, indices]
        pairs = zip(self.prototypes.prototypes, ids, strict=True)
        # Each image has one prototype per granularity.
        return [torch.stack([c[own] for c, own in pairs], dim=1)] * len(keys), {}

    def _neighbours(
        self, support_set: SupportSet, keys: Sequence[Tensor], indices: Tensor, targets: Tensor
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """``NN(k, Q) = argmin_{q in Q} |k - q|`` (NNCLR, Eq. 4), the ``top_k`` nearest of each."""
        settings = self.kwargs.support_set
        images = indices.repeat(len(keys))
        excluded = images if settings.exclude_own else None
        found = support_set.nearest(torch.cat(list(keys)), settings.top_k, excluded)
        # Where fewer than `top_k` rows are allowed, the missing ones have similarity -inf.
        there = found.similarity.isfinite()
        similarity = torch.where(there, found.similarity, 0.0).sum() / there.sum().clamp(min=1)
        metrics = {"train_nn_similarity": similarity} | queue_metrics("support", support_set)
        if has_indices(self.cfg):
            own = support_set.indices[found.index] == images.unsqueeze(1)
            metrics["train_nn_own"] = own.float().mean()
        if not self.cfg.data.get("no_labels"):
            label = targets.repeat(len(keys)).unsqueeze(1)
            known = (found.labels >= 0) & (label >= 0)
            same = known & (found.labels == label)
            metrics["train_nn_acc"] = same.sum() / known.sum().clamp(min=1)
        return list(found.embeddings.chunk(len(keys))), metrics

    def against_negatives(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], positives: list[Tensor] | None
    ) -> list[ContrastiveTerms]:
        """The loss of each direction, with all crops of the other images as negatives.

        Arguments as :meth:`contrast` and :meth:`positives_of` have them.
        """
        if positives is not None and self.support_set is not None:
            return self._neighbours_against_batch(queries, positives)
        if positives is None and len(queries) == 2 and not self._mixing.active(self.current_epoch):
            # The same loss as the general case below, by a kernel for two views.
            return [two_view_terms(queries[0], queries[1], self.kwargs.temperature, self.estimator)]
        batch = batch_of_views(queries)
        if positives is not None:
            batch = batch._replace(positives=positives[0].repeat(len(queries), 1, 1))
        return [self._contrastive(*batch)]

    def _neighbours_against_batch(
        self, queries: Sequence[Tensor], neighbours: list[Tensor]
    ) -> list[ContrastiveTerms]:
        """Neighbours of each large crop with the predictions of every other crop (NNCLR, Eq. 3)."""
        unit = [F.normalize(q.float(), dim=1) for q in queries]
        # Gather once: every direction needs them again.
        all_queries = [distributed.gather_with_gradient(q) for q in unit]
        all_near = [distributed.gather(near) for near in neighbours]
        terms = []
        for u, near in enumerate(neighbours):
            for v, query in enumerate(unit):
                for k in range(near.shape[1]) if v != u else ():
                    loss, rows = nnclr_terms(
                        near[:, k],
                        query,
                        self.kwargs.temperature,
                        self.kwargs.symmetric,
                        self.estimator,
                        self._mixing.draw(self.current_epoch, len(all_queries[v]) - 1, query),
                        joined=(all_near[u][:, k], all_queries[v]),
                    )
                    terms.append(rows._replace(loss=loss))
        return terms

    def _contrastive(
        self, anchors: Tensor, positives: Tensor, candidates: Tensor, own: Tensor | None = None
    ) -> ContrastiveTerms:
        """-log(exp(s_p) / (exp(s_p) + M)); ``own`` are the columns of the anchors' images."""
        available = len(candidates) - (0 if own is None else own.shape[1])
        return contrastive(
            anchors,
            positives,
            candidates,
            excluded_columns=own,
            estimator=self.estimator,
            mixing=self._mixing.draw(self.current_epoch, available, anchors),
            temperature=self.kwargs.temperature,
            compute_dtype=torch.bfloat16 if self.kwargs.compute_dtype == "bfloat16" else None,
        )

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Updates the momentum networks, then writes the step's keys into queues and bank."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._written is None:
            return
        keys, indices, targets = self._written
        self._written = None
        for queue, key in zip(self.queues, keys, strict=False):
            queue.update_(distributed.gather(key))
        if self.support_set is not None:
            first = distributed.gather(keys[0])
            images, labels = distributed.gather(indices), distributed.gather(targets)
            self.support_set.update_(first, images, labels)
        if self.bank is not None:
            mean = F.normalize(torch.stack(keys).mean(0), dim=1)
            self.bank.update_(distributed.gather(indices), distributed.gather(mean))

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks whose embeddings are clustered."""
        return [self.backbone, self.projector]

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) that are clustered."""
        # Skip this class's forward pass: its predictor would update batch-norm statistics.
        return super().forward(X)["z"]  # type: ignore[no-any-return]

    def on_train_start(self) -> None:
        """Sizes the state by the training set."""
        super().on_train_start()
        # These buffers start as random rows, and DDP is told not to synchronise them.
        distributed.broadcast_buffers(*self.queues, *filter(None, [self.support_set]))
        if self.e_step is not None:
            self.e_step.start(self)
        if self.trainer.is_global_zero:
            self._warn()

    def _warn(self) -> None:
        """Warns of settings that may surprise."""
        kwargs, support = self.kwargs, self.kwargs.support_set
        warn_of_clamping(kwargs.tau_plus, kwargs.beta, kwargs.temperature, kwargs.proj_output_dim)
        self._mixing.warn_of_late_start(self.cfg)
        if self.e_step is not None:
            warn_of_late_start(self.cfg, kwargs.clusters, CLUSTERS)
        if self.support_set is None or support.exclude_own:
            return
        from solo_ext.config.check import common_config
        from solo_ext.data.indexed import training_set

        images = len(training_set(self.trainer, common_config(self.cfg)))
        if 2 * len(self.support_set.value) > images:
            logger.warning(
                f"method_kwargs.support_set.size={support.size} of {images} training images: an "
                "image's nearest neighbour will mostly be its own earlier embedding (watch "
                "train_nn_own); take a smaller size, or exclude_own: true"
            )

    def on_train_epoch_start(self) -> None:
        """Runs the E-step where there are prototypes and it is due."""
        super().on_train_epoch_start()
        if self.e_step is not None and self.e_step.is_due(self.current_epoch):
            metrics = self.e_step.run(self)
            self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)


class QueueContrastive(Contrastive, ProjectedMomentumMethod):  # type: ignore[misc]
    """Contrasts positives of the configured kind with past keys of a momentum encoder (MoCo).

    There is one queue per large crop, of that crop's keys; its anchors are the other crops.
    """

    def _build_momentum(self) -> None:
        self.momentum_projector = self._new_projector()
        initialize_momentum_params(self.projector, self.momentum_projector)
        shape = self.kwargs.queue_size or 0, self.kwargs.proj_output_dim
        self.queues.extend(FeatureQueue(*shape) for _ in range(self.num_large_crops))

    def _keys(self, out: dict[str, Any]) -> list[Tensor]:
        return out["momentum_z"]  # type: ignore[no-any-return]

    def against_negatives(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], positives: list[Tensor] | None
    ) -> list[ContrastiveTerms]:
        """Every crop with the positives of each other large crop, against that crop's queue."""
        unit = [F.normalize(q.float(), dim=1) for q in queries]
        terms = []
        for u, queue in enumerate(self.queues):
            others = [q for v, q in enumerate(unit) if v != u]
            own = keys[u].unsqueeze(1) if positives is None else positives[u]
            repeated = own.repeat(len(others), 1, 1)
            terms.append(self._contrastive(torch.cat(others), repeated, queue.value))
        return terms

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks whose embeddings are clustered."""
        return [self.momentum_backbone, self.momentum_projector]

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) that are clustered."""
        return self.momentum_forward(X)["z"]  # type: ignore[no-any-return]
