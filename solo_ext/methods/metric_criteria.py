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
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses import LOSSES
from solo_ext.memory.heads import BilinearCritic, ClassWeights

PML = "pml/"
"""Prefix of a pytorch-metric-learning class in a config."""
KEY = "method_kwargs.loss"

Loss = Callable[..., Tensor]
Views = Sequence[Tensor]
Result = tuple[Tensor, dict[str, Tensor]]
K = TypeVar("K", bound="type[Criterion]")


class Batch(NamedTuple):
    """What a criterion is built for.

    Attributes:
        num_large: number of large crops, which come first among the views.
        num_classes: C, for losses that have weights per class.
        dim: D of the embeddings.
        mining: how negatives of triplets are chosen.
    """

    num_large: int
    num_classes: int
    dim: int
    mining: str


class Criterion(nn.Module, ABC):
    """Calls a loss on embeddings and classes.

    Args:
        loss: the function, its hyper-parameters bound.
        batch: what the criterion is built for.
        own: settings named by :attr:`settings`.
    """

    tensors: ClassVar[int]
    """Number of tensors that it passes to the loss, as first arguments."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters of the config that the criterion takes instead of the loss."""
    uses_classes: ClassVar[bool] = False
    """Whether it makes a difference that two images are of one class."""

    def __init__(self, loss: Loss, batch: Batch) -> None:
        super().__init__()
        self.loss, self.num_large = loss, batch.num_large

    @abstractmethod
    def forward(self, views: Views, classes: Tensor) -> Result:
        """Loss and what to log.

        Args:
            views: (N, D) each, one per crop.
            classes: (N,) whole numbers.
        """

    def _pairs(self, views: Views) -> list[tuple[Tensor, Tensor]]:
        """Every crop with every other large crop."""
        large = range(self.num_large)
        return [(z, views[u]) for v, z in enumerate(views) for u in large if u != v]

    def _mean_over_pairs(self, views: Views, *more: Tensor) -> Tensor:
        return torch.stack([self.loss(a, b, *more) for a, b in self._pairs(views)]).mean()


@dataclass(frozen=True)
class Training:
    """How ``metric`` trains a loss.

    Attributes:
        criterion: class that calls the loss.
        raw: whether the loss uses the embeddings' length; they are then not normalised by default.
        normalizes: whether the loss itself normalises, whatever the config says.
    """

    criterion: type[Criterion]
    raw: bool = False
    normalizes: bool = False


CRITERIA: dict[str, Training] = {}
"""How each loss is trained, by the name that configs give it."""


def trains(*losses: str, raw: bool = False, normalizes: bool = False) -> Callable[[K], K]:
    """Decorator that registers the losses a criterion trains.

    Args:
        losses: names, as configs write them.
        raw: as in :class:`Training`.
        normalizes: as in :class:`Training`.

    Example:
        >>> def someones_loss_func(x, targets, power=1.0): ...
        >>> trains("someones_loss_func")(LabelCriterion).__name__
        'LabelCriterion'
        >>> CRITERIA.pop("someones_loss_func").criterion.tensors
        2
    """

    def add(criterion: K) -> K:
        CRITERIA.update(dict.fromkeys(losses, Training(criterion, raw, normalizes)))
        return criterion

    return add


@trains("soft_nearest_neighbor_loss_func", "lifted_structured_loss_func")
class LabelCriterion(Criterion):
    """All crops at once, each with the class of its image: ``loss(x, targets)``."""

    tensors, uses_classes = 2, True

    def forward(self, views: Views, classes: Tensor) -> Result:
        return self.loss(torch.cat(list(views)), classes.repeat(len(views))), {}


@trains("nt_xent_loss_func", "debiased_loss_func", "hard_negative_loss_func", normalizes=True)
@trains("n_pair_loss_func", raw=True)
@trains("alignment_loss_func")
class PairCriterion(Criterion):
    """Two crops of the same images: ``loss(z1, z2)``."""

    tensors = 2

    def forward(self, views: Views, classes: Tensor) -> Result:
        return self._mean_over_pairs(views), {}


@trains("uniformity_loss_func")
class CropCriterion(Criterion):
    """Each crop by itself: ``loss(x)``."""

    tensors = 1

    def forward(self, views: Views, classes: Tensor) -> Result:
        return torch.stack([self.loss(z) for z in views]).mean(), {}


@trains("clip_loss_func", normalizes=True)
class ScaledPairCriterion(Criterion):
    """Two crops and a scale: ``loss(image, text, logit_scale)``.

    The scale is fixed where ``logit_scale`` gives it, above 0; else learned as CLIP does, from
    1 / 0.07 and at most 100.

    Raises:
        ValueError: the scale is not positive.
    """

    tensors, settings = 3, ("logit_scale",)

    def __init__(self, loss: Loss, batch: Batch, logit_scale: float | None = None) -> None:
        super().__init__(loss, batch)
        fixed = logit_scale is not None
        if logit_scale is not None and not logit_scale > 0:
            raise ValueError(f"logit_scale={logit_scale}: must be above 0")
        self.largest = math.inf if fixed else math.log(100)
        start = torch.tensor(math.log(1 / 0.07 if logit_scale is None else logit_scale))
        self.log_scale = nn.Parameter(start, requires_grad=not fixed)

    def forward(self, views: Views, classes: Tensor) -> Result:
        held = self.log_scale
        # Clamp the value but pass the gradient: with a gradient of 0 it would stay at the cap.
        scale = (held - (held - held.clamp(max=self.largest)).detach()).exp()
        return self._mean_over_pairs(views, scale), {"train_logit_scale": scale.detach()}


@trains("bilinear_info_nce_loss_func", raw=True)
class CriticCriterion(Criterion):
    """Two crops under a learned bilinear critic: ``loss(query, context, weight)``."""

    tensors = 3

    def __init__(self, loss: Loss, batch: Batch) -> None:
        super().__init__(loss, batch)
        self.critic = BilinearCritic(batch.dim, batch.dim)

    def forward(self, views: Views, classes: Tensor) -> Result:
        return self._mean_over_pairs(views, self.critic.weight), {}


@trains("contrastive_loss_func")
class SamenessCriterion(Criterion):
    """The views of an image, and one of them with a view of the next: ``loss(x, y, same)``."""

    tensors, uses_classes = 3, True

    def forward(self, views: Views, classes: Tensor) -> Result:
        joined_classes = distributed.gather(classes)
        following = _own_place(classes, shift=1) % len(joined_classes)
        also_same = joined_classes[following] == classes
        losses = []
        for a, b in self._pairs(views):
            other = distributed.gather_with_gradient(b)[following]
            same = torch.cat((torch.ones_like(also_same), also_same))
            losses.append(self.loss(torch.cat((a, a)), torch.cat((b, other)), same))
        return torch.stack(losses).mean(), {}


@trains("triplet_loss_func")
class TripletCriterion(Criterion):
    """An image's views and a mined image of another class: ``loss(anchor, positive, negative)``.

    ``mining`` is ``hard``: the nearest; ``semi_hard``: the nearest that is farther than the
    positive, or where there is none the farthest; ``random``: any.
    """

    tensors, uses_classes = 3, True

    def __init__(self, loss: Loss, batch: Batch) -> None:
        super().__init__(loss, batch)
        self.mining = batch.mining

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
        """Indices (N,) of the chosen candidates, and (N, 1) whether there was one."""
        anchor, positive, candidates = full_precision(anchor, positive, candidates)
        with full_precision_products(anchor.device):
            if self.mining == "random":
                # Images come in random order: take the first of another class after the own one.
                total = other.shape[1]
                order = torch.arange(total, device=anchor.device)
                distance = (order - _own_place(anchor).unsqueeze(1)) % total
                distance = distance.to(anchor.dtype)
            else:
                distance = torch.cdist(anchor, candidates)
        none = distance.new_full((), math.inf)
        nearest_other = torch.where(other, distance, none)
        chosen = nearest_other.argmin(1)
        if self.mining == "semi_hard":
            reach = (anchor - positive).norm(dim=1, keepdim=True)
            beyond = torch.where(nearest_other > reach, nearest_other, none)
            farthest = torch.where(other, distance, -none).argmax(1)
            chosen = torch.where(beyond.amin(1) < none, beyond.argmin(1), farthest)
        return chosen, other.any(1, keepdim=True)


@trains("arcface_loss_func", "cosface_loss_func", normalizes=True)
class MarginCriterion(Criterion):
    """All crops against learned weights of the classes: ``loss(cosine, target)``."""

    tensors, uses_classes = 2, True

    def __init__(self, loss: Loss, batch: Batch) -> None:
        super().__init__(loss, batch)
        self.class_weights = ClassWeights(batch.num_classes, batch.dim)

    def forward(self, views: Views, classes: Tensor) -> Result:
        x, target = torch.cat(list(views)), classes.repeat(len(views))
        cosine = self.class_weights(x)
        found = (cosine.detach().argmax(1) == target).float().mean()
        return self._loss(x, cosine, target), {"train_class_weight_acc": found}

    def _loss(self, x: Tensor, cosine: Tensor, target: Tensor) -> Tensor:
        return self.loss(cosine, target)


@trains("sphereface_loss_func", raw=True)
class NormMarginCriterion(MarginCriterion):
    """As :class:`MarginCriterion`, also with the features' length: ``feature_norm=``."""

    def _loss(self, x: Tensor, cosine: Tensor, target: Tensor) -> Tensor:
        return self.loss(cosine, target, feature_norm=full_precision(x)[0].norm(dim=1))


@trains("nce_loss_func", normalizes=True)
class NoiseCriterion(Criterion):
    """An image's views as data, other images as noise: ``loss(data_logits, noise_logits)``.

    Logits are cosines over the ``temperature`` less ``log K``, K others: ``exp(cosine / T)`` stands
    for the ratio of the densities of data and noise.

    Raises:
        ValueError: the temperature is not positive.
    """

    tensors, settings = 2, ("temperature",)

    def __init__(self, loss: Loss, batch: Batch, temperature: float = 0.2) -> None:
        super().__init__(loss, batch)
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: must be above 0")
        self.temperature = temperature

    def forward(self, views: Views, classes: Tensor) -> Result:
        losses = []
        for a, b in self._pairs(views):
            a, b = full_precision(a, b)
            with full_precision_products(a.device):
                a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
                joined = distributed.gather_with_gradient(b)
                total = joined.shape[0]
                logits = a @ joined.T / self.temperature - math.log(max(total - 1, 1))
            steps = torch.arange(total, device=a.device)
            columns = (_own_place(a).unsqueeze(1) + steps) % total
            logits = logits.gather(1, columns)
            losses.append(self.loss(logits[:, 0], logits[:, 1:]))
        return torch.stack(losses).mean(), {}


class ModuleCriterion(LabelCriterion):
    """A loss of pytorch-metric-learning, on the crops of all processes."""

    def __init__(self, loss: nn.Module, batch: Batch) -> None:
        super().__init__(loss, batch)
        self.module = loss

    def forward(self, views: Views, classes: Tensor) -> Result:
        x, targets = torch.cat(list(views)), classes.repeat(len(views))
        # Every process computes the loss of the joined batch, as the library is not distributed.
        joined = distributed.gather_with_gradient(x), distributed.gather(targets)
        return self.loss(*joined), {}


class ProxyCriterion(ModuleCriterion):
    """A loss of pytorch-metric-learning that learns weights of classes."""


def _own_place(rows: Tensor, shift: int = 0) -> Tensor:
    """(N,) positions of this process's rows among those of all processes, plus ``shift``."""
    count = rows.shape[0]
    return torch.arange(count, device=rows.device) + distributed.rank() * count + shift


def metric_losses() -> list[str]:
    """Names of the registered losses that the method ``metric`` can train."""
    return [name for name in LOSSES if name in CRITERIA]


def training_of(name: str) -> Training:
    """How a loss is trained.

    Args:
        name: of a registered loss, or ``pml/`` and a class of pytorch-metric-learning.

    Raises:
        ConfigError: it is unknown, or needs something that a batch does not contain.
    """
    if name.startswith(PML):
        proxies = "num_classes" in inspect.signature(_pml_class(name).__init__).parameters
        return Training(ProxyCriterion if proxies else ModuleCriterion)
    if name not in LOSSES:
        raise ConfigError(KEY, name, "unknown loss", nearest(name, metric_losses()))
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
        name: as :func:`training_of` takes it.
        given: hyper-parameters of the loss.
        batch: what the criterion is built for.

    Raises:
        ConfigError: as :func:`training_of`.
    """
    kind, left = training_of(name).criterion, dict(given)
    if name.startswith(PML):
        return kind(_pml_loss(name, given, batch), batch)
    own = {key: left.pop(key) for key in kind.settings if key in left}
    return kind(functools.partial(LOSSES[name].target, **left), batch, **own)


def check_loss_kwargs(name: str, given: Mapping[str, Any]) -> None:
    """Refuses hyper-parameters that the loss does not take, or values that it rejects.

    Raises:
        ConfigError: names the first unknown one, or quotes the loss's own error.
    """
    allowed = _hyper_parameters(name)
    for key in given:
        if key not in allowed:
            raise ConfigError(
                f"method_kwargs.loss_kwargs.{key}",
                given[key],
                f"{name} takes no such argument",
                (nearest(key, allowed) if allowed else "it takes none")
                + "; those of a config go with ~method_kwargs.loss_kwargs",
            )
    try:
        # Try the values on two images: the loss itself says whether it takes them.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            criterion = build_criterion(name, given, Batch(2, 2, 2, "hard"))
            # Not for other packages' losses, which may need more images, nor on several processes.
            ours = name in LOSSES and LOSSES[name].origin == "solo_ext"
            if ours and distributed.world_size() == 1:
                criterion([torch.eye(2)] * 2, torch.arange(2))
    except (TypeError, ValueError) as error:
        problem, _, remedy = str(error).partition(": ")
        raise ConfigError(
            "method_kwargs.loss_kwargs", dict(given), problem, remedy or f"see {name}"
        ) from None


def _hyper_parameters(name: str) -> list[str]:
    """Hyper-parameters that a config may set: all arguments but the tensors."""
    kind = training_of(name).criterion
    if name.startswith(PML):
        taken = list(inspect.signature(_pml_class(name).__init__).parameters.values())[1:]
    else:
        taken = list(inspect.signature(LOSSES[name].target).parameters.values())[kind.tensors :]
    named = (p for p in taken if p.kind is not p.VAR_KEYWORD and "Tensor" not in str(p.annotation))
    return [*(p.name for p in named), *kind.settings]


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
        remedy = nearest(wanted, known)
        raise ConfigError(KEY, name, "pytorch-metric-learning has no such loss", remedy)
    return getattr(losses, wanted)  # type: ignore[no-any-return]


def _pml_loss(name: str, given: Mapping[str, Any], batch: Batch) -> nn.Module:
    made = _pml_class(name)
    takes = inspect.signature(made.__init__).parameters
    known = {"num_classes": batch.num_classes, "embedding_size": batch.dim}
    return made(**{**{k: v for k, v in known.items() if k in takes}, **given})  # type: ignore[no-any-return]
