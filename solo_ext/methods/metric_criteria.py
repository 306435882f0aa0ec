"""What each kind of metric loss compares: which embeddings, and with which classes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.memory.heads import BilinearCritic, ClassWeights

Loss = Callable[..., Tensor]


class Criterion(nn.Module, ABC):
    """A loss of embeddings and classes.

    Args:
        loss: the function, its hyper-parameters bound.
        num_large: large crops; the first of the views.
    """

    uses_classes = False
    """Whether images of one class are anything else to it than images of two."""

    takes_raw = False
    """Whether the length of the embeddings means something to the loss."""

    def __init__(self, loss: Loss, num_large: int) -> None:
        super().__init__()
        self.loss, self.num_large = loss, num_large

    @abstractmethod
    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and what to log.

        Args:
            views: (N, D) each, one per crop.
            classes: (N,) whole numbers.
        """

    def _pairs(self, views: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Every crop with every other large crop."""
        large = range(self.num_large)
        return [(z, views[u]) for v, z in enumerate(views) for u in large if u != v]


class LabelCriterion(Criterion):
    """All crops at once, each with the class of its image: ``(x, targets)``."""

    uses_classes = True

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(torch.cat(list(views)), classes.repeat(len(views))), {}


class OfModule(LabelCriterion):
    """A loss of pytorch-metric-learning, on the crops of all processes.

    Args:
        loss: the module.
        num_large: large crops.
    """

    def __init__(self, loss: nn.Module, num_large: int) -> None:
        super().__init__(loss, num_large)
        self.module = loss

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, targets = torch.cat(list(views)), classes.repeat(len(views))
        # Every process computes the whole loss, for it knows none of the others.
        joined = distributed.gather_with_gradient(x), distributed.gather(targets)
        return self.loss(*joined), {}


class OfProxies(OfModule):
    """One that learns weights of classes."""


class OfViews(Criterion):
    """Two crops of the same images: ``(z1, z2)``."""

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.stack([self.loss(a, b) for a, b in self._pairs(views)]).mean(), {}


class PairCriterion(Criterion):
    """Each crop by itself: ``(x)``."""

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.stack([self.loss(z) for z in views]).mean(), {}


class OfScaledViews(Criterion):
    """Two crops: ``(image, text, logit_scale)``.

    Args:
        loss: the function.
        num_large: large crops.
        scale: fixed, above 0; by default learned as CLIP does, from 1 / 0.07 and at most 100.

    Raises:
        ValueError: the scale is not positive.
    """

    def __init__(self, loss: Loss, num_large: int, scale: float | None = None) -> None:
        super().__init__(loss, num_large)
        if scale is not None and not scale > 0:
            raise ValueError(f"logit_scale={scale}: must be above 0")
        self.largest = math.log(100) if scale is None else math.inf
        start = torch.tensor(math.log(1 / 0.07 if scale is None else scale))
        self.log_scale = nn.Parameter(start, requires_grad=scale is None)

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        held = self.log_scale
        # Held at the cap in value alone: a gradient of zero there would never lead back.
        scale = (held - (held - held.clamp(max=self.largest)).detach()).exp()
        loss = torch.stack([self.loss(a, b, scale) for a, b in self._pairs(views)]).mean()
        return loss, {"train_logit_scale": scale.detach()}


class OfPairs(Criterion):
    """The views of an image, and one of them with a view of the next image: ``(x, y, same)``."""

    uses_classes = True

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        joined_classes = distributed.gather(classes)
        following = _own_place(classes, shift=1, total=len(joined_classes))
        also_same = joined_classes[following] == classes
        losses = []
        for a, b in self._pairs(views):
            other = distributed.gather_with_gradient(b)[following]
            same = torch.cat((torch.ones_like(also_same), also_same))
            losses.append(self.loss(torch.cat((a, a)), torch.cat((b, other)), same))
        return torch.stack(losses).mean(), {}


class OfTriplets(Criterion):
    """The views of an image and a mined image of another class: ``(anchor, positive, negative)``.

    Args:
        loss: the function.
        num_large: large crops.
        mining: ``hard``: the nearest; ``semi_hard``: the nearest that is farther than the positive,
            or where there is none the farthest; ``random``: any.
    """

    uses_classes = True

    def __init__(self, loss: Loss, num_large: int, mining: str) -> None:
        super().__init__(loss, num_large)
        self.mining = mining

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        joined_classes = distributed.gather(classes)
        other = joined_classes != classes.unsqueeze(1)
        losses, similar = [], []
        for a, b in self._pairs(views):
            candidates = distributed.gather_with_gradient(b)
            chosen, valid = self._mine(a.detach(), b.detach(), candidates.detach(), other)
            negative = candidates[chosen]
            similar.append(F.cosine_similarity(a.detach(), negative.detach()).mean())
            # Without an image of another class: a triplet that no margin reaches.
            rows = [torch.where(valid, x, torch.zeros_like(x)) for x in (a, b)]
            far = torch.where(valid, negative, torch.full_like(negative, 1e3))
            losses.append(self.loss(*rows, far))
        metrics = {"train_mined_similarity": torch.stack(similar).mean()}
        return torch.stack(losses).mean(), metrics

    def _mine(
        self, anchor: Tensor, positive: Tensor, candidates: Tensor, other: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(N,) chosen candidates, and (N, 1) whether there was any."""
        anchor, positive, candidates = full_precision(anchor, positive, candidates)
        with full_precision_products(anchor.device):
            if self.mining == "random":
                # Images come in random order: the first of another class after one's own.
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


class OfMargins(Criterion):
    """All crops against learned weights of the classes: ``(cosine, target)``.

    Args:
        loss: the function.
        num_large: large crops.
        num_classes: C.
        dim: D.
        takes_norm: whether the loss takes the length of the features.
    """

    uses_classes = True

    def __init__(
        self, loss: Loss, num_large: int, num_classes: int, dim: int, takes_norm: bool
    ) -> None:
        super().__init__(loss, num_large)
        self.class_weights = ClassWeights(num_classes, dim)
        self.takes_norm = self.takes_raw = takes_norm

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, target = torch.cat(list(views)), classes.repeat(len(views))
        cosine = self.class_weights(x)
        extra = {"feature_norm": full_precision(x)[0].norm(dim=1)} if self.takes_norm else {}
        found = (cosine.detach().argmax(1) == target).float().mean()
        return self.loss(cosine, target, **extra), {"train_class_weight_acc": found}


class NoiseCriterion(Criterion):
    """An image's views as data, other images as noise: ``(data_logits, noise_logits)``.

    Logits are cosines over the temperature less ``log K``, K others: ``exp(cosine / T)`` stands for
    the ratio of the densities of data and noise.

    Args:
        loss: the function.
        num_large: large crops.
        temperature: above 0.

    Raises:
        ValueError: it is not.
    """

    def __init__(self, loss: Loss, num_large: int, temperature: float) -> None:
        super().__init__(loss, num_large)
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: must be above 0")
        self.temperature = temperature

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
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


class OfCritic(Criterion):
    """Two crops under a learned bilinear critic: ``(query, context, weight)``."""

    takes_raw = True

    def __init__(self, loss: Loss, num_large: int, dim: int) -> None:
        super().__init__(loss, num_large)
        self.critic = BilinearCritic(dim, dim)

    def forward(self, views: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weight = self.critic.weight
        pairs = self._pairs(views)
        return torch.stack([self.loss(a, b, weight) for a, b in pairs]).mean(), {}


def _own_place(rows: Tensor, shift: int = 0, total: int | None = None) -> Tensor:
    """(N,) places of this process's rows among those of all, moved on by ``shift``."""
    count = rows.shape[0]
    places = torch.arange(count, device=rows.device) + distributed.rank() * count + shift
    return places if total is None else places % total
