"""Criteria of ``metric``: which embeddings a loss compares, and with which classes.

A criterion registers the losses that it trains (:func:`trains`) and passes them their first
arguments. A loss of another package registers with the matching criterion in the same way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError, suggest_name, unknown_name
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels.normalized import normalized
from solo_ext.losses import LOSSES
from solo_ext.losses.common import check_not_negative, check_positive
from solo_ext.losses.contrastive import own_columns
from solo_ext.memory.heads import ClassWeights

PML = "pml/"
"""Prefix of a pytorch-metric-learning class in a config."""
KEY = "method_kwargs.loss"

Loss = Callable[..., Tensor]
Views = Sequence[Tensor]
Result = tuple[Tensor, dict[str, Tensor]]
K = TypeVar("K", bound="type[Criterion]")
ANY = ("instance", "label", "cluster")


class Batch(NamedTuple):
    """Sizes and settings that a criterion is built for.

    Attributes:
        num_large: number of large crops, which come first among the views.
        num_classes: C, for losses that have weights per class.
        dim: D of the embeddings.
        mining: how negatives of triplets are chosen.

    Example:
        >>> Batch(num_large=2, num_classes=10, dim=128)
        Batch(num_large=2, num_classes=10, dim=128, mining='semi_hard')
    """

    num_large: int
    num_classes: int
    dim: int
    mining: str = "semi_hard"


class Criterion(nn.Module, ABC):
    """Calls a loss on embeddings and classes.

    Attributes:
        step: number of optimiser steps of the run so far, which the method sets.
        changes_by_step: whether the loss depends on it.

    Args:
        loss: the function.
        batch: sizes and settings.
        **given: hyper-parameters of the loss; a subclass names in its constructor those that it
            uses itself.

    Example:
        >>> class Distance(Criterion):
        ...     def forward(self, views, classes):
        ...         return self._mean_over_pairs(views), {}
        >>> criterion = Distance(F.mse_loss, Batch(num_large=2, num_classes=5, dim=8))
        >>> criterion([torch.zeros(4, 8), torch.ones(4, 8)], torch.arange(4))
        (tensor(1.), {})
    """

    classes: ClassVar[tuple[str, ...]] = ("instance",)
    """What may count as one class; only instances if the loss ignores that images share a class."""

    def __init__(self, loss: Loss, batch: Batch, **given: Any) -> None:
        super().__init__()
        if given:
            # Names that the loss does not take fail here, and not in the first step.
            _signature(loss).bind_partial(**given)
            loss = functools.partial(loss, **given)
        self.loss = loss
        self.batch = batch
        self.step = 0
        self.changes_by_step = False

    @abstractmethod
    def forward(self, views: Views, classes: Tensor) -> Result:
        """Loss and what to log.

        Args:
            views: (N, D) each, one per crop.
            classes: (N,) integers.
        """

    def _pairs(self, views: Views) -> list[tuple[Tensor, Tensor]]:
        """Every crop with every other large crop."""
        large = range(self.batch.num_large)
        return [(z, views[u]) for v, z in enumerate(views) for u in large if u != v]

    def _mean_over_pairs(self, views: Views, *more: Tensor) -> Tensor:
        return torch.stack([self.loss(a, b, *more) for a, b in self._pairs(views)]).mean()


CRITERIA: dict[str, type[Criterion]] = {}
"""The criterion of each loss, by the loss's name in configs."""
OF_LENGTH: set[str] = set()
"""Losses that use the embeddings' length, which are then not normalised by default."""


def trains(*losses: str, of_length: bool = False) -> Callable[[K], K]:
    """Decorator that registers the losses a criterion trains.

    Args:
        losses: names, as configs write them.
        of_length: whether these losses use the embeddings' length.

    Example:
        >>> def someones_loss_func(x, targets, power=1.0): ...
        >>> trains("someones_loss_func")(LabelCriterion).__name__
        'LabelCriterion'
        >>> CRITERIA.pop("someones_loss_func").classes
        ('instance', 'label', 'cluster')
    """

    def add(criterion: K) -> K:
        CRITERIA.update(dict.fromkeys(losses, criterion))
        OF_LENGTH.update(losses if of_length else ())
        return criterion

    return add


@trains("soft_nearest_neighbor_loss_func", "lifted_structured_loss_func")
class LabelCriterion(Criterion):
    """All crops at once, each with the class of its image: ``loss(x, targets)``.

    Example:
        >>> from solo_ext.losses import soft_nearest_neighbor_loss_func
        >>> criterion = LabelCriterion(soft_nearest_neighbor_loss_func, Batch(2, 5, 8))
        >>> views, classes = [torch.randn(4, 8), torch.randn(4, 8)], torch.tensor([0, 0, 1, 1])
        >>> loss, metrics = criterion(views, classes)
        >>> loss.shape, metrics
        (torch.Size([]), {})
    """

    classes = ANY

    def forward(self, views: Views, classes: Tensor) -> Result:
        return self.loss(torch.cat(list(views)), classes.repeat(len(views))), {}


@trains("nt_xent_loss_func", "debiased_loss_func", "hard_negative_loss_func")
@trains("n_pair_loss_func", of_length=True)
@trains("alignment_loss_func")
class PairCriterion(Criterion):
    """Two crops of the same images: ``loss(z1, z2)``.

    Example:
        >>> criterion = PairCriterion(F.mse_loss, Batch(num_large=2, num_classes=5, dim=8))
        >>> criterion([torch.zeros(4, 8), torch.ones(4, 8)], torch.arange(4))
        (tensor(1.), {})
    """

    def forward(self, views: Views, classes: Tensor) -> Result:
        return self._mean_over_pairs(views), {}


@trains("uniformity_loss_func")
class CropCriterion(Criterion):
    """Each crop by itself: ``loss(x)``.

    Example:
        >>> criterion = CropCriterion(lambda x: x.norm(dim=1).mean(), Batch(2, 5, dim=4))
        >>> criterion([torch.zeros(3, 4), torch.ones(3, 4)], torch.arange(3))
        (tensor(1.), {})
    """

    def forward(self, views: Views, classes: Tensor) -> Result:
        return torch.stack([self.loss(z) for z in views]).mean(), {}


@trains("clip_loss_func")
class CLIPCriterion(Criterion):
    """Two crops and a scale: ``loss(image, text, logit_scale)``.

    A ``logit_scale`` above 0 fixes the scale; by default it is learned as in CLIP, from 1 / 0.07
    and at most 100.

    Example:
        >>> from solo_ext.losses import clip_loss_func
        >>> criterion = CLIPCriterion(clip_loss_func, Batch(2, 5, 8))
        >>> loss, metrics = criterion([torch.eye(4, 8), torch.eye(4, 8)], torch.arange(4))
        >>> loss.shape, round(metrics["train_logit_scale"].item(), 2)
        (torch.Size([]), 14.29)
    """

    def __init__(
        self, loss: Loss, batch: Batch, logit_scale: float | None = None, **given: Any
    ) -> None:
        super().__init__(loss, batch, **given)
        fixed = logit_scale is not None
        if logit_scale is not None:
            check_positive(logit_scale=logit_scale)
        self.largest = math.inf if fixed else math.log(100)
        start = torch.tensor(math.log(1 / 0.07 if logit_scale is None else logit_scale))
        self.log_scale = nn.Parameter(start, requires_grad=not fixed)

    def forward(self, views: Views, classes: Tensor) -> Result:
        held = self.log_scale
        # Clamp the value but pass the gradient: without one the scale would stay at the cap.
        scale = (held - (held - held.clamp(max=self.largest)).detach()).exp()
        return self._mean_over_pairs(views, scale), {"train_logit_scale": scale.detach()}


@trains("bilinear_info_nce_loss_func", of_length=True)
class BilinearCriterion(Criterion):
    """Two crops under a learned bilinear critic: ``loss(query, context, weight)``.

    Example:
        >>> from solo_ext.losses import bilinear_info_nce_loss_func
        >>> criterion = BilinearCriterion(bilinear_info_nce_loss_func, Batch(2, 5, dim=8))
        >>> loss, _ = criterion([torch.randn(4, 8), torch.randn(4, 8)], torch.arange(4))
        >>> criterion.critic.weight.shape, loss.shape
        (torch.Size([8, 8]), torch.Size([]))
    """

    def __init__(self, loss: Loss, batch: Batch, **given: Any) -> None:
        super().__init__(loss, batch, **given)
        # Scores z^T W c start with unit variance if the rows have unit variance.
        weight = torch.empty(batch.dim, batch.dim).normal_(std=1 / batch.dim)
        self.critic: Any = nn.ParameterDict({"weight": weight})

    def forward(self, views: Views, classes: Tensor) -> Result:
        return self._mean_over_pairs(views, self.critic.weight), {}


@trains("contrastive_loss_func")
class ContrastivePairCriterion(Criterion):
    """Pairs of an image's views, and of views of it and the next image: ``loss(x, y, same)``.

    Example:
        >>> share_of_same = lambda x, y, same: same.float().mean()
        >>> criterion = ContrastivePairCriterion(share_of_same, Batch(2, 5, 8))
        >>> criterion([torch.zeros(4, 8)] * 2, torch.tensor([0, 0, 1, 2]))  # 5 of 8 pairs
        (tensor(0.6250), {})
    """

    classes = ANY

    def forward(self, views: Views, classes: Tensor) -> Result:
        joined_classes = distributed.gather(classes)
        following = (own_columns(classes).squeeze(1) + 1) % len(joined_classes)
        also_same = joined_classes[following] == classes
        same = torch.cat((torch.ones_like(also_same), also_same))
        losses = []
        for a, b in self._pairs(views):
            other = distributed.gather_with_gradient(b)[following]
            losses.append(self.loss(torch.cat((a, a)), torch.cat((b, other)), same))
        return torch.stack(losses).mean(), {}


@trains("triplet_loss_func")
class TripletCriterion(Criterion):
    """An image's views and a mined image of another class: ``loss(anchor, positive, negative)``.

    ``mining`` chooses among images of other classes: ``hard``: the nearest; ``semi_hard``: the
    nearest that is farther than the positive, else the farthest; ``random``: any.

    Example:
        >>> from solo_ext.losses import triplet_loss_func
        >>> criterion = TripletCriterion(triplet_loss_func, Batch(2, 5, 4, mining="hard"))
        >>> criterion([torch.eye(4), torch.eye(4)], torch.arange(4))
        (tensor(0.), {'train_mined_similarity': tensor(0.)})
    """

    classes = ANY

    def forward(self, views: Views, classes: Tensor) -> Result:
        other = distributed.gather(classes) != classes.unsqueeze(1)
        losses, similar = [], []
        for a, b in self._pairs(views):
            candidates = distributed.gather_with_gradient(b)
            chosen, valid = self._mine(a.detach(), b.detach(), candidates.detach(), other)
            negative = candidates[chosen]
            similar.append(F.cosine_similarity(a.detach(), negative.detach()).mean())
            # Rows without an image of another class get a triplet whose loss is 0.
            rows = [torch.where(valid, x, torch.zeros_like(x)) for x in (a, b)]
            far = torch.where(valid, negative, torch.full_like(negative, 1e3))
            losses.append(self.loss(*rows, far))
        metrics = {"train_mined_similarity": torch.stack(similar).mean()}
        return torch.stack(losses).mean(), metrics

    def _mine(
        self, anchor: Tensor, positive: Tensor, candidates: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Indices (N,) of the chosen candidates, and whether there are any candidates (N, 1)."""
        anchor, positive, candidates = full_precision(anchor, positive, candidates)
        if self.batch.mining == "random":
            # Images come in random order: take the next one of another class.
            order = torch.arange(other.shape[1], device=anchor.device)
            distance = ((order - own_columns(anchor)) % other.shape[1]).to(anchor.dtype)
        else:
            with full_precision_products(anchor.device):
                distance = torch.cdist(anchor, candidates)
        none = distance.new_full((), math.inf)
        nearest_other = torch.where(other, distance, none)
        chosen = nearest_other.argmin(1)
        if self.batch.mining == "semi_hard":
            reach = (anchor - positive).norm(dim=1, keepdim=True)
            beyond = torch.where(nearest_other > reach, nearest_other, none)
            farthest = torch.where(other, distance, -none).argmax(1)
            chosen = torch.where(beyond.amin(1) < none, beyond.argmin(1), farthest)
        return chosen, other.any(1, keepdim=True)


@trains("arcface_loss_func", "cosface_loss_func")
class MarginCriterion(Criterion):
    """All crops against learned weights of the classes: ``loss(cosine, target)``.

    Example:
        >>> from solo_ext.losses import arcface_loss_func
        >>> criterion = MarginCriterion(arcface_loss_func, Batch(2, 5, dim=8), margin=0.3)
        >>> loss, metrics = criterion([torch.randn(4, 8), torch.randn(4, 8)], torch.arange(4))
        >>> criterion.class_weights.weight.shape, loss.shape, list(metrics)
        (torch.Size([5, 8]), torch.Size([]), ['train_class_weight_acc'])
    """

    classes = ("label", "cluster")

    def __init__(self, loss: Loss, batch: Batch, **given: Any) -> None:
        super().__init__(loss, batch, **given)
        self.class_weights = ClassWeights(batch.num_classes, batch.dim)

    def forward(self, views: Views, classes: Tensor) -> Result:
        x, target = torch.cat(list(views)), classes.repeat(len(views))
        cosine = self.class_weights(x)
        found = (cosine.detach().argmax(1) == target).float().mean()
        return self._loss(x, cosine, target), {"train_class_weight_acc": found}

    def _loss(self, x: Tensor, cosine: Tensor, target: Tensor) -> Tensor:
        return self.loss(cosine, target)


@trains("sphereface_loss_func", of_length=True)
class SphereFaceCriterion(MarginCriterion):
    """As :class:`MarginCriterion`, and passes the features' length as ``feature_norm``.

    In optimiser step n, counted from 1, the loss is annealed by ``annealing_start / (1 + 0.12 n)``,
    at least ``annealing``; the authors take 1,000 and 5.

    Example:
        >>> from solo_ext.losses import sphereface_loss_func
        >>> criterion = SphereFaceCriterion(sphereface_loss_func, Batch(2, 5, 8), annealing=5.0)
        >>> loss, _ = criterion([torch.randn(4, 8), torch.randn(4, 8)], torch.arange(4))
        >>> loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        loss: Loss,
        batch: Batch,
        annealing: float = 0.0,
        annealing_start: float = 0.0,
        **given: Any,
    ) -> None:
        super().__init__(loss, batch, **given)
        check_not_negative(annealing=annealing, annealing_start=annealing_start)
        self.annealing, self.annealing_start = annealing, annealing_start
        self.changes_by_step = annealing_start > 0

    def _loss(self, x: Tensor, cosine: Tensor, target: Tensor) -> Tensor:
        annealing = max(self.annealing, self.annealing_start / (1 + 0.12 * (self.step + 1)))
        norms = full_precision(x)[0].norm(dim=1)
        return self.loss(cosine, target, feature_norm=norms, annealing=annealing)


@trains("nce_loss_func")
class NoiseCriterion(Criterion):
    """An image's views as data, other images as noise: ``loss(data_logits, noise_logits)``.

    Logits are cosines divided by the ``temperature`` T, minus ``log K`` for K other images:
    ``exp(cosine / T)`` stands for the ratio of the densities of data and noise.

    Example:
        >>> criterion = NoiseCriterion(lambda data, noise: data.mean(), Batch(2, 5, 4), 0.5)
        >>> loss, _ = criterion([torch.eye(4), torch.eye(4)], torch.arange(4))
        >>> loss  # 1 / 0.5 - log(3)
        tensor(0.9014)
    """

    def __init__(self, loss: Loss, batch: Batch, temperature: float = 0.2, **given: Any) -> None:
        super().__init__(loss, batch, **given)
        check_positive(temperature=temperature)
        self.temperature = temperature

    def forward(self, views: Views, classes: Tensor) -> Result:
        losses = []
        for a, b in self._pairs(views):
            a, b = full_precision(a, b)
            with full_precision_products(a.device):
                a, b = normalized(a), normalized(b)
                joined = distributed.gather_with_gradient(b)
                total = joined.shape[0]
                logits = a @ joined.T / self.temperature - math.log(max(total - 1, 1))
            # Put the image's own column first.
            columns = (own_columns(a) + torch.arange(total, device=a.device)) % total
            logits = logits.gather(1, columns)
            losses.append(self.loss(logits[:, 0], logits[:, 1:]))
        return torch.stack(losses).mean(), {}


class ModuleCriterion(Criterion):
    """A loss of pytorch-metric-learning, on the crops of all processes: ``loss(x, targets)``.

    Example:
        >>> criterion = ModuleCriterion(nn.MultiMarginLoss, Batch(2, num_classes=8, dim=8))
        >>> criterion([torch.eye(4, 8), torch.eye(4, 8)], torch.arange(4))
        (tensor(0.), {})
    """

    classes: ClassVar[tuple[str, ...]] = ANY

    def __init__(self, loss: Loss, batch: Batch, **given: Any) -> None:
        takes = inspect.signature(loss).parameters
        sizes = {"num_classes": batch.num_classes, "embedding_size": batch.dim}
        module: Any = loss(**{k: v for k, v in sizes.items() if k in takes} | given)
        super().__init__(module, batch)

    def forward(self, views: Views, classes: Tensor) -> Result:
        x, targets = torch.cat(list(views)), classes.repeat(len(views))
        # Every process computes the loss of the joined batch, as the library is not distributed.
        joined = distributed.gather_with_gradient(x), distributed.gather(targets)
        return self.loss(*joined), {}


class ProxyCriterion(ModuleCriterion):
    """A loss of pytorch-metric-learning with class weights, which cannot follow clusters.

    Example:
        >>> ModuleCriterion.classes, ProxyCriterion.classes
        (('instance', 'label', 'cluster'), ('label',))
    """

    classes = ("label",)


def metric_losses() -> list[str]:
    """Names of the registered losses that the method ``metric`` can train.

    Example:
        >>> sorted(metric_losses())[:3]
        ['alignment_loss_func', 'arcface_loss_func', 'bilinear_info_nce_loss_func']
    """
    return [name for name in LOSSES if name in CRITERIA]


def criterion_of(name: str) -> type[Criterion]:
    """The criterion that trains a loss.

    Args:
        name: a registered loss, or ``pml/`` and a class of pytorch-metric-learning.

    Raises:
        ConfigError: the loss is unknown, or needs something that a batch does not contain.

    Example:
        >>> criterion_of("triplet_loss_func").__name__
        'TripletCriterion'
    """
    if name.startswith(PML):
        takes = inspect.signature(_pml_class(name)).parameters
        return ProxyCriterion if "num_classes" in takes else ModuleCriterion
    if name not in LOSSES:
        raise unknown_name(KEY, name, "loss", metric_losses())
    if name not in CRITERIA:
        raise ConfigError(
            KEY,
            name,
            "no criterion trains it: what it compares is the business of a method of its own",
            f"choose one of {', '.join(metric_losses())}, or register it with "
            "solo_ext.methods.metric_criteria.trains",
        )
    return CRITERIA[name]


def build_criterion(name: str, given: Mapping[str, Any], batch: Batch) -> Criterion:
    """Builds the criterion of a loss, with the parameters that it learns.

    Args:
        name: as :func:`criterion_of` takes it.
        given: hyper-parameters of the loss.
        batch: sizes and settings.

    Raises:
        ConfigError: as :func:`criterion_of`.

    Example:
        >>> batch = Batch(num_large=2, num_classes=5, dim=8)
        >>> criterion = build_criterion("arcface_loss_func", {"margin": 0.3}, batch)
        >>> views, classes = [torch.randn(4, 8), torch.randn(4, 8)], torch.arange(4)
        >>> loss, metrics = criterion(views, classes)
        >>> loss.shape, list(metrics)
        (torch.Size([]), ['train_class_weight_acc'])
    """
    return criterion_of(name)(_target(name), batch, **given)


def check_loss_kwargs(name: str, given: Mapping[str, Any]) -> None:
    """Refuses hyper-parameters that the loss does not take, or values that it rejects.

    Raises:
        ConfigError: the loss refuses them; the message quotes its error.

    Example:
        >>> check_loss_kwargs("triplet_loss_func", {"margin": 0.5})
        >>> check_loss_kwargs("triplet_loss_func", {"gap": 0.5})
        Traceback (most recent call last):
            ...
        solo_ext.core.errors.ConfigError: ...={'gap': 0.5}: got an unexpected keyword argument ...
    """
    try:
        # Call our losses with two images, because they refuse wrong values only when called.
        # Losses of other packages may need more images.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            criterion = build_criterion(name, given, Batch(2, 2, 2))
            ours = name in LOSSES and LOSSES[name].origin == "solo_ext"
            if ours and distributed.world_size() == 1:
                criterion([torch.eye(2)] * 2, torch.arange(2))
    except (TypeError, ValueError) as error:
        takes = ", ".join(_signature(_target(name)).parameters)
        remedy = f"{name} takes {takes}; drop those of a config with ~method_kwargs.loss_kwargs"
        raise ConfigError("method_kwargs.loss_kwargs", dict(given), str(error), remedy) from None


def _signature(loss: Any) -> inspect.Signature:
    try:
        return inspect.signature(loss)
    except ValueError:  # A function in C has no signature: accept any names.
        return inspect.signature(lambda *args, **kwargs: None)


def _target(name: str) -> Any:
    return _pml_class(name) if name.startswith(PML) else LOSSES[name].target


def _pml_class(name: str) -> type[Any]:
    try:
        losses = importlib.import_module("pytorch_metric_learning.losses")
    except ImportError:
        raise ConfigError(
            KEY,
            name,
            "pytorch-metric-learning is not installed",
            "install the extra: pip install 'solo-ext[metric]'",
        ) from None
    wanted = name.removeprefix(PML)
    known = [n for n in dir(losses) if n.endswith("Loss")]
    if wanted not in known:
        remedy = suggest_name(wanted, known)
        raise ConfigError(KEY, name, "pytorch-metric-learning has no such loss", remedy)
    return getattr(losses, wanted)  # type: ignore[no-any-return]
