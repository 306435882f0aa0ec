"""``eval linear_augmented``: trains linear classifiers by SGD on augmented views."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt, MinLen
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError
from solo_ext.core.types import LearningRate, NonNegativeFloat, PositiveInt
from solo_ext.data.images import targets_of
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import pooled
from solo_ext.lab.evaluation.linear import holdout_mask
from solo_ext.lab.evaluation.protocol import Row, accuracies
from solo_ext.lab.evaluation.supervised import (
    BASE_BATCH,
    Diverged,
    EvalCheckpoint,
    SupervisedProtocol,
    seeded,
)
from solo_ext.memory.state import eval_mode


class LinearHeadSweep(nn.Module):
    """Linear classifiers for several rates, to choose a rate by held-out images.

    For every rate one classifier is trained on all images; if a rate is to be chosen, a second one
    is trained without the held-out images. All start at zero: cross-entropy is convex in them.

    Args:
        features_dim: D.
        num_classes: C.
        rates: number of learning rates.
        choosing: whether to train the second classifiers.

    >>> heads = LinearHeadSweep(8, 3, rates=2, choosing=True)
    >>> loss = heads.loss(torch.ones(4, 8), torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 0, 1]))
    >>> round(loss.item(), 4)
    4.3944
    """

    def __init__(self, features_dim: int, num_classes: int, rates: int, choosing: bool) -> None:
        super().__init__()
        self.final, self.choosing = (
            nn.ModuleList(nn.Linear(features_dim, num_classes) for _ in range(count))
            for count in (rates, rates * choosing)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def loss(self, features: Tensor, targets: Tensor, seen: Tensor) -> Tensor:
        """Sum over the classifiers of their mean cross-entropies.

        Args:
            features: (B, D).
            targets: (B,).
            seen: (B,), 1 for the rows that are not held out, else 0.
        """
        total = features.new_zeros(())
        for head in self.final:
            total = total + F.cross_entropy(head(features), targets)
        rows = seen.sum().clamp_min(1)
        for head in self.choosing:
            own = F.cross_entropy(head(features), targets, reduction="none")
            total = total + (own * seen).sum() / rows
        return total


class LinearAugmented(SupervisedProtocol):
    """Settings of ``eval linear_augmented``: SGD on augmented views, with a frozen backbone.

    Momentum 0.9, a cosine schedule to 0, ``weight_decay`` of weights and biases. Every rate of
    ``lr``, given for a batch of 256, has two classifiers on the same features: the first is trained
    on all images, the second without those held out. The rate is chosen whose second classifier is
    best on the fixed views of the held-out images, on a tie the smallest; its first is tested.
    """

    title: ClassVar[str] = "Linear probe, SGD on augmented views"
    file: ClassVar[str] = "linear_augmented.safetensors"

    epochs: PositiveInt = 100
    lr: Annotated[list[LearningRate], MinLen(1)] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
    weight_decay: NonNegativeFloat = 0.0
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.1

    def trained(self, context: EvalContext, checkpoint: EvalCheckpoint) -> tuple[Row, nn.Module]:
        rates, choosing = sorted(self.lr), len(self.lr) > 1
        targets = torch.as_tensor(targets_of(context.train))
        held = holdout_mask(targets.numpy(), self.holdout, self.seed)
        if choosing and not bool(held.any()):
            raise ConfigError(
                "lr",
                self.lr,
                "no class has two training images, so none can be held out to choose a rate",
                "give one rate",
            )
        loader, width = self.loader(context), context.model.features_dim
        backbone = context.backbone().requires_grad_(False).to(context.device)
        with seeded(self.seed):
            heads = LinearHeadSweep(width, len(context.class_names), len(rates), choosing)
        heads.to(context.device)
        scaled = [rate * self.batch_size / BASE_BATCH for rate in rates]
        pairs = zip((*heads.final, *heads.choosing), 2 * scaled, strict=False)
        groups = [{"params": list(head.parameters()), "lr": rate} for head, rate in pairs]
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=self.weight_decay)

        def loss(indices: Tensor, views: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad(), eval_mode(backbone), self.autocast(views.device):
                features = pooled(backbone(views), len(views))
            return heads.loss(features, targets, (~held[indices]).to(features))

        self.train(context, checkpoint, loader, heads, optimizer, loss, heads_only=True)
        return self._measured(context, heads.cpu(), held, rates)

    @torch.no_grad()
    def _measured(
        self, context: EvalContext, heads: LinearHeadSweep, held: Tensor, rates: list[float]
    ) -> tuple[Row, nn.Module]:
        """The row of the chosen rate, and its classifier."""
        (x, y), (x_test, y_test) = context.features.train, context.features.test
        chosen, about = 0, {}
        if heads.choosing:
            rows = x[held].float()
            scores = [accuracies(head(rows), y[held])["acc1"] for head in heads.choosing]
            chosen = scores.index(max(scores))
            shown = ", ".join(f"{r:g}: {s:.2f}" for r, s in zip(rates, scores, strict=True))
            about = {"held_out": shown}
        logits = heads.final[chosen](x_test.float())
        if not bool(logits.isfinite().all()):
            raise Diverged(
                f"lr={self.lr}: the answers of the classifiers are not finite; take smaller ones"
            )
        found = accuracies(logits, y_test)
        row = {**found, "lr": rates[chosen], "epochs": self.epochs, **about}
        return row, heads.final[chosen]
