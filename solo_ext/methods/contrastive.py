"""Contrastive learning: the config sets positives, negatives, their weighting and their mixing.

``L = mean -log(exp(s_p) / (exp(s_p) + M))`` over anchors and their positives p, where s is the
cosine divided by the temperature T. One step, and where the code has each line::

    z = g(f(x)) of every crop; q = h(z) with a predictor, else z       training_step
    k = z of the large crops, without gradient; with a queue that
        of the momentum networks (MoCo)                                _keys
    p = the image's other views (SimCLR), NN(k, Q) (NNCLR, Eq. 4),
        or the prototypes of the image's clusters                      positives_of
    n = the batch (SimCLR), or a queue of past k (MoCo, Eq. 1)         against_negatives
      + mixtures of the hardest of them (MoCHi, Eq. 4 and 5)           MixingSampler
    M = N max((R - tau_plus P) / (1 - tau_plus), exp(-1 / T)),         NegativeEstimator
        R the mean of exp(s_n), P of exp(s_p), with weights
        exp(beta s) (debiased, Eq. 7 and 8; hard negatives, Eq. 4)
    theta_k <- tau theta_k + (1 - tau) theta_q (MoCo, Eq. 2)           on_train_batch_end
    queue, Q <- k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.precision import factors_dtype, full_precision
from solo_ext.host import BaseMethod, initialize_momentum_params
from solo_ext.kernels.nearest_rows import nearest_rows
from solo_ext.kernels.normalized import normalized
from solo_ext.losses.contrastive import (
    ContrastiveTerms,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    two_view_terms,
)
from solo_ext.losses.nnclr import nnclr_terms
from solo_ext.memory.features import FeatureQueue, SupportSet
from solo_ext.memory.heads import projector, split_batch_norm
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.contrastive_kwargs import (
    ContrastiveKwargs,
    fill_sizes,
    validate,
)
from solo_ext.methods.e_step import CLUSTERS, EStep
from solo_ext.methods.negatives import (
    MixingSampler,
    annealed_beta,
    mean_of,
    queue_metrics,
    term_metrics,
)
from solo_ext.methods.projected import ProjectedMethod, ProjectedMomentumMethod
from solo_ext.methods.registry import (
    fill_method_kwargs,
    has_indices,
    require_two_views,
    typed_kwargs,
)


@dataclass(frozen=True)
class Preset:
    """A named contrastive method, which differs from the others in its defaults only.

    Calling it with solo-learn main's config makes the module: :class:`Contrastive`, or with
    ``negatives: queue`` :class:`QueueContrastive`. There are two classes because solo-learn's base
    class of momentum methods always has a momentum backbone, which negatives of the batch do not
    need.

    Attributes:
        kwargs_type: class of its ``method_kwargs``.

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

    def __call__(self, cfg: DictConfig) -> Contrastive:
        """Checks and completes the config, and makes its module."""
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

    Logs ``train_<method>_loss``, the geometry of :class:`ProjectedMethod`, and those metrics of
    docs/reference/logged.md that apply.

    Args:
        cfg: checked and filled in by :class:`Preset`.
        kwargs_type: class of its settings.

    Example:
        >>> from solo_ext.methods import Debiased
        >>> from solo_ext.methods.registry import example_config
        >>> method = Debiased(example_config("debiased", proj_output_dim=16, pred_hidden_dim=0))
        >>> type(method).__name__, method(torch.randn(4, 3, 32, 32))["z"].shape
        ('Contrastive', torch.Size([4, 16]))
    """

    def __init__(self, cfg: DictConfig, kwargs_type: type[ContrastiveKwargs]) -> None:
        super().__init__(cfg)
        self.kwargs = kwargs = typed_kwargs(self.cfg.method_kwargs, kwargs_type)
        dim = kwargs.proj_output_dim
        self.estimator = NegativeEstimator(kwargs.tau_plus, kwargs.beta, kwargs.detach_weights)
        self.projector = self._new_projector(kwargs, last_batch_norm=kwargs.proj_last_batch_norm)
        hidden = kwargs.pred_hidden_dim
        self.predictor = projector(dim, hidden, dim) if hidden else None
        self.queues: Any = nn.ModuleList()
        self._build_momentum()
        near = kwargs.positives == "nearest_neighbor"
        self.support_set = SupportSet(kwargs.support_set.size or 0, dim) if near else None
        clustered = kwargs.positives == "prototype"
        settings = kwargs.clusters if clustered else None
        self.e_step = EStep(settings, CLUSTERS, dim, kwargs.temperature)
        self.prototypes, self.bank = self.e_step.prototypes, self.e_step.bank
        self._mixing = MixingSampler(kwargs.mixing)
        self.step_draws = self._mixing.generators
        self._has_indices = has_indices(self.cfg)
        self._has_labels = not self.cfg.data.get("no_labels")
        keep_out_of_broadcast(self)

    def _build_momentum(self) -> None:
        """Hook for :class:`QueueContrastive`, which adds a momentum projector and queues."""

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the predictor."""
        h = self.predictor
        more = [] if h is None else [{"name": "predictor", "params": h.parameters()}]
        return [*super().learnable_params, *more]

    def on_train_batch_start(self, batch: Sequence[Any], batch_idx: int) -> None:
        """Seeds the draws of the step."""
        self._mixing.begin(self._seed, self.current_epoch, batch_idx)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The contrastive loss plus the online classifier's."""
        indices, _, targets = batch
        # z = g(f(x)), q = h(z) of every crop; and the online classifier.
        out = super().training_step(batch, batch_idx)
        queries = out["z"] if self.predictor is None else [self.predictor(z) for z in out["z"]]
        # k: unit rows of the large crops, without gradient.
        embeddings = torch.stack(self._keys(out)).detach()
        keys = list(F.normalize(full_precision(embeddings)[0], dim=2).unbind())
        if self.kwargs.anneal_beta:
            beta = annealed_beta(self.kwargs.beta, self.current_epoch, self.cfg.max_epochs)
            self.estimator = replace(self.estimator, beta=beta)
        loss, metrics = self.contrast(queries, keys, indices, targets)
        self._step_keys = keys, indices, targets
        predictions = [] if self.predictor is None else queries
        self.log_step(loss, metrics, [*out["z"], *predictions])
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
                encoder if there is one.
            indices: (N,) sample indices.
            targets: (N,) labels, only for metrics.

        Returns:
            Scalar, and what to log.
        """
        positives, images, metrics = self.positives_of(keys, indices, targets)
        terms = self.against_negatives(queries, keys, indices, positives, images)
        loss = mean_of([t.loss for t in terms])
        debiased, mixing = self.kwargs.tau_plus > 0, self._mixing.active(self.current_epoch)
        return loss, metrics | term_metrics(terms, debiased=debiased, mixing=mixing)

    def positives_of(
        self, keys: Sequence[Tensor], indices: Tensor, targets: Tensor
    ) -> tuple[list[Tensor] | None, list[Tensor], dict[str, Tensor]]:
        """What the anchors are to be similar to.

        Returns:
            Positives (N, P, D) that replace the key of each large crop, or ``None`` if the views
            themselves are the positives, as before the first E-step; the sample indices (N, P) of
            the images that these show, or nothing for prototypes; what to log.
        """
        if self.support_set is not None:
            return self._neighbours(self.support_set, keys, indices, targets)
        if self.prototypes.epoch < 0:
            return None, [], {}
        ids = self.prototypes.assignments_of(indices)
        pairs = zip(self.prototypes.prototypes, ids, strict=True)
        # Each image has one prototype per granularity.
        return [torch.stack([c[own] for c, own in pairs], dim=1)] * len(keys), [], {}

    def _neighbours(
        self, support_set: SupportSet, keys: Sequence[Tensor], indices: Tensor, targets: Tensor
    ) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        """``NN(k, Q) = argmin_{q in Q} |k - q|`` (NNCLR, Eq. 4), the ``top_k`` nearest of each."""
        settings = self.kwargs.support_set
        images = indices.repeat(len(keys))
        ids = (images, support_set.indices) if settings.exclude_own else (None, None)
        rows, similarity = nearest_rows(
            torch.cat(list(keys)),
            support_set.value,
            settings.top_k,
            query_ids=ids[0],
            table_ids=ids[1],
            exact=settings.exact,
        )
        embeddings, neighbours = support_set.value[rows], support_set.indices[rows]
        if settings.exclude_own:
            # If fewer than `top_k` rows are allowed, the missing ones have similarity -inf.
            there = similarity.isfinite()
            mean = torch.where(there, similarity, 0.0).sum() / there.sum().clamp(min=1)
        else:
            mean = similarity.mean()
        metrics = {"train_nn_similarity": mean}
        if self._has_indices:
            metrics["train_nn_own"] = (neighbours == images.unsqueeze(1)).float().mean()
        if self._has_labels:
            label = targets.repeat(len(keys)).unsqueeze(1)
            labels = support_set.labels[rows]
            known = torch.minimum(labels, label) >= 0
            same = (labels == label) & known
            metrics["train_nn_acc"] = same.sum() / known.sum().clamp(min=1)
        count = len(keys)
        return list(embeddings.chunk(count)), list(neighbours.chunk(count)), metrics

    def against_negatives(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        indices: Tensor,
        positives: list[Tensor] | None,
        images: list[Tensor],
    ) -> list[ContrastiveTerms]:
        """The loss of each direction, with all crops of the other images as negatives.

        The arguments are those of :meth:`contrast` and the first results of :meth:`positives_of`.
        """
        if positives is not None and self.support_set is not None:
            return self._neighbours_against_batch(queries, positives)
        if positives is None and len(queries) == 2 and not self._mixing.active(self.current_epoch):
            # The same loss as the general case below, by a kernel for two views.
            return [two_view_terms(queries[0], queries[1], self.kwargs.temperature, self.estimator)]
        batch = batch_of_views(queries)
        if positives is not None:
            batch = batch._replace(positives=positives[0].repeat(len(queries), 1, 1))
        return [self._contrastive(*batch[:3], excluded_columns=batch.excluded_columns)]

    def _neighbours_against_batch(
        self, queries: Sequence[Tensor], neighbours: list[Tensor]
    ) -> list[ContrastiveTerms]:
        """Neighbours of each large crop against predictions of every other crop (NNCLR, Eq. 3)."""
        unit = normalized(full_precision(torch.stack(list(queries)))[0]).unbind()
        # Gather once for all directions.
        all_queries = distributed.gather_each(unit, gradient=True)
        all_near = distributed.gather_each(neighbours) if self.kwargs.symmetric else neighbours
        pairs = [
            (u, v, k)
            for u, near in enumerate(neighbours)
            for v in range(len(unit))
            for k in range(near.shape[1])
            if v != u
        ]
        nn = torch.stack([neighbours[u][:, k] for u, _, k in pairs])
        p = torch.stack([unit[v] for _, v, _ in pairs])
        all_nn = torch.stack([all_near[u][:, k] for u, _, k in pairs])
        all_p = torch.stack([all_queries[v] for _, v, _ in pairs])
        kwargs, candidates = self.kwargs, all_p.shape[1] - 1
        shared = kwargs.temperature, kwargs.symmetric, self.estimator
        if not self._mixing.active(self.current_epoch):
            loss, rows = nnclr_terms(nn, p, *shared, joined=(all_nn, all_p))
            return [rows._replace(loss=loss)]
        terms = []
        for n, query in enumerate(p):
            mixing = self._mixing.draw(self.current_epoch, candidates, query)
            loss, rows = nnclr_terms(nn[n], query, *shared, mixing, joined=(all_nn[n], all_p[n]))
            terms.append(rows._replace(loss=loss))
        return terms

    def _contrastive(
        self, anchors: Tensor, positives: Tensor, candidates: Tensor, **excluded: Tensor
    ) -> ContrastiveTerms:
        """-log(exp(s_p) / (exp(s_p) + M)), without the candidates of the anchors' images."""
        own = excluded.get("excluded_columns")
        available = len(candidates) - (0 if own is None else own.shape[1])
        mixing = self._mixing.draw(self.current_epoch, available, anchors)
        dtype = None
        if self.kwargs.negatives == "queue" and mixing is None:
            dtype = factors_dtype(self.kwargs.compute_dtype, anchors.device)
        return contrastive(
            anchors,
            positives,
            candidates,
            estimator=self.estimator,
            mixing=mixing,
            temperature=self.kwargs.temperature,
            compute_dtype=dtype,
            **excluded,
        )

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Updates the momentum networks, then writes the step's keys into queues and bank."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        keys, indices, targets = self._step_keys
        # The support set takes the first view's keys, which the first queue takes too: gather once.
        wanted = len(self.queues) or int(self.support_set is not None)
        joined = distributed.gather_each(keys[:wanted]) if wanted else []
        known = self.support_set is not None or self.kwargs.exclude_own
        images = distributed.gather_each([indices, targets]) if known else []
        for queue, key in zip(self.queues, joined, strict=False):
            queue.update_(key, *images)
        if self.support_set is not None:
            self.support_set.update_(joined[0], *images)
        self.e_step.update_bank(indices, keys)

    def on_train_start(self) -> None:
        """Synchronises the queues over ranks and prepares the E-step."""
        super().on_train_start()
        # Queues start as random rows, and DDP does not synchronise them.
        distributed.broadcast_buffers(*self.queues, *filter(None, [self.support_set]))
        self.e_step.start(self)
        self._mixing.warn_of_late_start(self.cfg)

    def on_train_epoch_start(self) -> None:
        """Runs the E-step if the method has prototypes and an E-step is due."""
        super().on_train_epoch_start()
        self.e_step.before_epoch(self)

    def on_train_epoch_end(self) -> None:
        """Logs fill and age of queue and support set."""
        super().on_train_epoch_end()
        held = {"queue": self.queues[0] if len(self.queues) else None, "support": self.support_set}
        for name, rows in held.items():
            if rows is not None:
                self.log_dict(queue_metrics(name, rows), sync_dist=True)


class QueueContrastive(Contrastive, ProjectedMomentumMethod):  # type: ignore[misc]
    """Contrasts positives of the configured kind with past keys of a momentum encoder (MoCo).

    Each large crop has a queue of its past keys, against which the other crops are contrasted.

    Example:
        >>> from solo_ext.methods import HardNegative
        >>> from solo_ext.methods.registry import example_config
        >>> method = HardNegative(example_config("hard_negative", negatives="queue", queue_size=8))
        >>> type(method).__name__, [tuple(queue.value.shape) for queue in method.queues]
        ('QueueContrastive', [(8, 128), (8, 128)])
        >>> method.embed(torch.randn(4, 3, 32, 32)).shape
        torch.Size([4, 128])
    """

    def _build_momentum(self) -> None:
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        last = self.kwargs.proj_last_batch_norm
        self.momentum_projector = self._new_projector(self.kwargs, last_batch_norm=last)
        initialize_momentum_params(self.projector, self.momentum_projector)
        shape = self.kwargs.queue_size or 0, self.kwargs.proj_output_dim
        near = self.kwargs.positives == "nearest_neighbor"
        kind = SupportSet if self.kwargs.exclude_own or near else FeatureQueue
        self.queues.extend(kind(*shape) for _ in range(self.num_large_crops))
        if self.kwargs.batch_norm_splits > 1:
            for network in (self.backbone, self.momentum_backbone):
                split_batch_norm(network, self.kwargs.batch_norm_splits)

    @torch.no_grad()
    def momentum_forward(self, X: Tensor) -> dict[str, Any]:
        """As in the base class; with split batch norm, on shuffled images (MoCo's shuffling BN)."""
        if self.kwargs.batch_norm_splits == 1 or not self.momentum_backbone.training:
            return super().momentum_forward(X)
        order = torch.randperm(len(X), device=X.device)
        out, back = super().momentum_forward(X[order]), order.argsort()
        return {name: value[back] for name, value in out.items()}

    def _keys(self, out: dict[str, Any]) -> list[Tensor]:
        return out["momentum_z"]  # type: ignore[no-any-return]

    def contrast(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], indices: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As in the base class; keeps the first crop's queries for a metric at the epoch's end."""
        as_mined = self.kwargs.exclude_own and self.kwargs.positives != "nearest_neighbor"
        if as_mined and self._mixing.active(self.current_epoch):
            self._last = F.normalize(queries[0].detach().float(), dim=1), indices, targets
        return super().contrast(queries, keys, indices, targets)

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        """Logs what share of the rows that the last batch would mine is of the query's class.

        Only queues of ``exclude_own`` hold labels. A step mines in a kernel and cannot log this.
        Steps with neighbours leave out their images too, which are not known here any more.
        """
        super().on_train_epoch_end()
        last, self._last = self._last, None
        if last is None or not self._has_labels:
            return
        query, indices, targets = last
        queue, most = self.queues[1], self.kwargs.mixing.num_hard or 1
        similar = query @ queue.value.to(query.dtype).T
        similar.masked_fill_(indices.unsqueeze(1) == queue.indices, float("-inf"))
        labels, own = queue.labels[similar.topk(most).indices], targets.unsqueeze(1)
        known = (labels >= 0) & (own >= 0)
        share = (known & (labels == own)).sum() / known.sum().clamp(min=1)
        self.log_dict({"train_mined_same_class": share}, sync_dist=True)

    def against_negatives(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        indices: Tensor,
        positives: list[Tensor] | None,
        images: list[Tensor],
    ) -> list[ContrastiveTerms]:
        """Every crop with the positives of each other large crop, against that crop's queue.

        Without ``symmetric``, the first crop is only a query. A queue holds the keys of images that
        are neighbours too: they are positives, and so no negatives.
        """
        unit = normalized(full_precision(torch.stack(list(queries)))[0]).unbind()
        terms = []
        for u, queue in enumerate(self.queues):
            if u == 0 and not self.kwargs.symmetric:
                continue
            others = [q for v, q in enumerate(unit) if v != u]
            own = keys[u].unsqueeze(1) if positives is None else positives[u]
            excluded = dict[str, Tensor]()
            several = len(others) > 1
            no_negatives = [indices.unsqueeze(1)] if self.kwargs.exclude_own else []
            if images:
                # Rows of the random start have the number -1, in the support set and in the queue.
                no_negatives.append(images[u].where(images[u] >= 0, -2))
            if no_negatives:
                ids = torch.cat(no_negatives, dim=1).repeat(len(others), 1)
                excluded = {"anchor_ids": ids, "candidate_ids": queue.indices}
            anchors = torch.cat(others) if several else others[0]
            repeated = own.repeat(len(others), 1, 1) if several else own
            terms.append(self._contrastive(anchors, repeated, queue.value, **excluded))
        return terms
