"""Prototypical contrastive learning: MoCo with the prototypes of several clusterings.

Li et al., ICLR 2021, arXiv 2005.04966. Algorithm 1: the E-step before an epoch, X all images::

    V' = f'(X), unit rows                                                     EStep.run
    C^m = centroids of k-means of V' with k_m clusters, m = 1 .. M            clustering.e_step
    phi = sum_z |v'_z - c|_2 / (Z log(Z + alpha)) of every cluster,  Eq. 12   clustering.e_step
        clipped and scaled to a mean of T, as in the official code

and the M-step for every batch, x and x' two views of an image::

    v = f(x), v' = f'(x')                                                     training_step
    info = -log exp(v.v'/T) / sum_j exp(v.v'_j/T), v' and the queue  Eq. 11   contrast
    proto = 1/M sum_m -log exp(v.c_s/phi_s) / sum_j exp(v.c_j/phi_j) Eq. 11   contrast
    loss = info + proto_weight proto                                 Eq. 11   contrast
    f' <- m f' + (1 - m) f, and v' enters the queue                           on_train_batch_end

In both terms v, v' and c are of unit length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.draws import StepGenerators, derive_seed
from solo_ext.core.errors import ConfigError
from solo_ext.core.precision import ComputeDtype, factors_dtype, full_precision
from solo_ext.core.types import NonNegativeFloat, PositiveFloat, PositiveInt
from solo_ext.host import initialize_momentum_params
from solo_ext.kernels.normalized import normalized
from solo_ext.losses.info_nce import Collisions, info_nce_terms, proto_nce_terms
from solo_ext.memory.features import FeatureQueue
from solo_ext.memory.heads import projector
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.e_step import (
    PUBLISHED_CLUSTERS,
    EStep,
    EStepKwargs,
    check_e_step,
    check_prototypes,
)
from solo_ext.methods.projected import ProjectedMomentumMethod
from solo_ext.methods.registry import (
    METHODS,
    capped_queue,
    fill_from_data,
    fill_method_kwargs,
    require_indices,
    require_two_views,
    scaled_clusters,
    typed_kwargs,
)

KEY = "method_kwargs"


class PCLKwargs(EStepKwargs):
    """``method_kwargs`` of :class:`PCL`; defaults of the official ImageNet runs of PCL v2.

    Beside those of :class:`solo_ext.methods.e_step.EStepKwargs`, during whose warm-up epochs the
    loss is InfoNCE alone:

    Attributes:
        head: ``v1`` is linear, ``v2`` an MLP without batch norm.
        proj_hidden_dim: width of the MLP's hidden layer; null is the width of the features.
        proj_output_dim: D of the embeddings.
        temperature: temperature of InfoNCE, and mean of the concentrations.
        queue_size: number of past keys; null: 16,384, but at most an eighth of the training images.
        proto_weight: weight of the prototypes' term, the second of Eq. 11; 0 leaves MoCo, without
            an E-step.
        num_negatives: number of prototypes drawn as negatives at every step, officially 16,384;
            null takes all.
        collisions: with drawn negatives, as :func:`solo_ext.losses.proto_nce_loss_func` takes it.
        symmetric: whether each view is query and key in turn; else, as published, the first view is
            the query.
        compute_dtype: dtype of products with queue and prototypes; sums and exponentials stay in
            fp32. ``auto`` is bfloat16 on a GPU under autocast to it, else float32.

    Example:
        >>> PCLKwargs(num_prototypes=[100, 200], proto_weight=0.5).warmup_epochs
        20
    """

    head: Literal["v1", "v2"] = "v2"
    proj_hidden_dim: PositiveInt | None = None
    proj_output_dim: PositiveInt = 128
    temperature: PositiveFloat = 0.2
    queue_size: PositiveInt | None = None
    proto_weight: NonNegativeFloat = 1.0
    num_negatives: PositiveInt | None = None
    collisions: Collisions = "paper"
    symmetric: bool = False
    compute_dtype: ComputeDtype = "auto"


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
    ``train_proto_acc_<K>``, the share of queries whose own prototype has the largest logit, and of
    the last batch of an epoch ``train_collisions_<K>``, the share of images with another one of the
    batch in their cluster; ``e_step/...`` as :meth:`solo_ext.methods.e_step.EStep.run` says.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`PCLKwargs`.

    Example:
        >>> from solo_ext.methods.registry import example_config
        >>> cfg = example_config("pcl", queue_size=16, num_prototypes=[3, 6])
        >>> method, views = PCL(cfg), torch.randn(2, 4, 3, 32, 32)
        >>> v = method(views[0])["z"]
        >>> key = F.normalize(method.embed(views[1]), dim=1)
        >>> loss, _ = method.contrast([v], [key], indices=torch.arange(4))
        >>> v.shape, loss.shape
        (torch.Size([4, 128]), torch.Size([]))
    """

    kwargs_type = PCLKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.kwargs = kwargs = typed_kwargs(self.cfg.method_kwargs, PCLKwargs)
        assert kwargs.queue_size is not None  # fill_sizes has replaced null by a number
        hidden = (kwargs.proj_hidden_dim or self.features_dim) if kwargs.head == "v2" else 0
        dim = kwargs.proj_output_dim
        self.projector, self.momentum_projector = (
            projector(self.features_dim, hidden, dim, batch_norm=False) for _ in range(2)
        )
        initialize_momentum_params(self.projector, self.momentum_projector)
        directions = range(2 if kwargs.symmetric else 1)
        self.queues: Any = nn.ModuleList(FeatureQueue(kwargs.queue_size, dim) for _ in directions)
        settings = kwargs if kwargs.proto_weight else None
        self.e_step = EStep(settings, KEY, dim, kwargs.temperature)
        self._step_clusters: Tensor | None = None
        self.step_draws = StepGenerators(derive_seed)
        self.prototypes, self.bank = self.e_step.prototypes, self.e_step.bank
        keep_out_of_broadcast(self)

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do.

        Raises:
            ConfigError: a setting is out of range, or does not fit the others or the data.
        """
        cfg = ProjectedMomentumMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg)
        cfg = fill_method_kwargs(cfg, PCLKwargs)
        PCL.fill_sizes(cfg)
        kwargs = cfg.method_kwargs
        if not kwargs.symmetric and cfg.momentum.classifier:
            raise ConfigError(
                "momentum.classifier",
                True,
                "without method_kwargs.symmetric the momentum backbone sees one view only",
                "remove it, or set method_kwargs.symmetric=true",
            )
        if not kwargs.proto_weight:
            return cfg
        require_indices(cfg, "looks clusters up")
        coarsest, batch = min(kwargs.num_prototypes), cfg.optimizer.batch_size
        if kwargs.num_negatives is not None and kwargs.num_negatives > coarsest - batch:
            raise ConfigError(
                "method_kwargs.num_negatives",
                kwargs.num_negatives,
                f"of {coarsest} prototypes up to {batch} are positives of the batch",
                f"allowed: null, which is all, or up to {max(0, coarsest - batch)}",
            )
        check_e_step(kwargs, KEY)
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Sets the numbers of clusters and of queue rows that are null, by the training images.

        Raises:
            ConfigError: more clusters than images.
        """
        sizes = {
            "num_prototypes": scaled_clusters(*PUBLISHED_CLUSTERS),
            "queue_size": capped_queue(16384),
        }
        fill_from_data(cfg, sizes, images)
        if images is not None and cfg.method_kwargs.proto_weight:
            check_prototypes(cfg.method_kwargs, KEY, images)

    def geometry(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """The share of collisions; a step that is not ``symmetric`` has no second view."""
        clusters, self._step_clusters = self._step_clusters, None
        if clusters is None:
            return {}
        shared = (clusters.unsqueeze(1) == clusters.unsqueeze(2)).sum(2) > 1
        names = [f"train_collisions_{name}" for name in self.prototypes.names]
        return dict(zip(names, shared.float().mean(1).unbind(), strict=True))

    def on_train_start(self) -> None:
        """Synchronises the queues over ranks and prepares the E-step."""
        super().on_train_start()
        # Queues start as random rows, and DDP does not synchronise them.
        distributed.broadcast_buffers(*self.queues)
        self.e_step.start(self)

    def on_train_epoch_start(self) -> None:
        """E-step (Algorithm 1): prototypes and concentrations of all training images."""
        super().on_train_epoch_start()
        self.e_step.before_epoch(self)

    def on_train_batch_start(self, batch: Sequence[Any], batch_idx: int) -> None:
        """Seeds the draws of the step, alike after resuming and differently on each rank."""
        self.step_draws.begin(
            derive_seed(self._seed, distributed.rank(), self.current_epoch, batch_idx)
        )

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """M-step (Algorithm 1): the loss of Eq. 11, plus the online classifier's."""
        indices, crops, targets = batch
        # v = f(x), v' = f'(x): queries of the online networks, keys of the momentum ones.
        if self.kwargs.symmetric:
            out = super().training_step(batch, batch_idx)
            queries, projected = out["z"], out["momentum_z"]
        else:
            out = self._classified(crops[0], targets)
            queries, projected = [out["z"]], [self.momentum_forward(crops[1])["z"]]
        keys = list(F.normalize(full_precision(torch.stack(projected))[0], dim=2).unbind())
        # A query's key comes from the other view.
        loss, metrics = self.contrast(queries, keys[::-1], indices)
        self._step_keys = indices, keys
        self.step_embeddings = [v.detach() for v in queries]
        self.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True)
        return loss + out["loss"]  # type: ignore[no-any-return]

    def contrast(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        indices: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of Eq. 11, the mean over its directions, and what to log.

        Args:
            queries: v, (N, D) each, one per direction.
            keys: v', (N, D) each, unit rows of the other view.
            indices: (N,) sample indices.
        """
        dtype = factors_dtype(self.kwargs.compute_dtype, indices.device)
        # First term: -log exp(v.v'_i / T) / sum_j exp(v.v'_j / T), j over v'_i and the
        # queue of the key's view.
        queues = [past.value for past in self.queues][::-1]
        # Stack the views: gradients are then summed in a fixed order.
        (views,) = full_precision(torch.stack(list(queries)))
        unit, positives = normalized(views), torch.stack(list(keys))
        info = info_nce_terms(unit, positives, queues, self.kwargs.temperature, dtype).mean()
        metrics = {"train_info_nce_loss": info}
        state = self.prototypes
        if state.epoch < 0:
            return info, metrics
        # Second term: 1/M sum_m -log exp(v.c_s / phi_s) / sum_j exp(v.c_j / phi_j), where s is
        # the cluster of the query's image.
        s = self._step_clusters = state.assignments_of(indices)
        losses, accuracy = proto_nce_terms(
            unit,
            state.prototypes,
            state.concentration,
            s,
            self._negatives(s),
            self.kwargs.collisions,
            dtype,
            state.scaled(dtype),
        )
        names = [f"train_proto_acc_{name}" for name in state.names]
        metrics |= dict(zip(names, accuracy.unbind(), strict=True))
        proto = metrics["train_proto_nce_loss"] = losses.mean()
        return info + self.kwargs.proto_weight * proto, metrics

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Moves the momentum networks, f' = m f' + (1 - m) f, then fills queue and bank."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        indices, keys = self._step_keys
        keys = distributed.gather_each(keys)
        for past, key in zip(self.queues, keys, strict=True):
            past.update_(key)
        if self.bank is not None:
            # `EStep.update_bank` would gather the keys once more.
            mean = F.normalize(torch.stack(keys).mean(0), dim=1)
            self.bank.update_(distributed.gather(indices), mean)

    def _negatives(self, positives: Tensor) -> list[Tensor] | None:
        """Draws (R,) distinct prototypes each, none of the positives (M, N); ``None`` takes all."""
        if self.kwargs.num_negatives is None:
            return None
        found, device = [], positives.device
        for m, size in enumerate(self.prototypes.num_prototypes):
            own = self.step_draws.next(device)
            lots = torch.rand(size, generator=own, device=device).index_fill_(0, positives[m], -1.0)
            found.append(lots.topk(self.kwargs.num_negatives, sorted=False).indices)
        return found

    def _classified(self, X: Tensor, targets: Tensor) -> dict[str, Any]:
        """Classifies the first view alone; solo-learn's step would classify every view."""
        out: dict[str, Any] = self.base_training_step(X, targets)
        names = {"train_class_loss": "loss", "train_acc1": "acc1", "train_acc5": "acc5"}
        metrics = {name: out[key] for name, key in names.items()}
        self.log_dict(metrics, on_epoch=True, sync_dist=True)
        if self.knn_eval:
            labelled = targets != -1
            self.knn(
                train_features=out["feats"][labelled].detach(), train_targets=targets[labelled]
            )
        return out
