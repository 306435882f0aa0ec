"""``eval linear_augmented``: trains linear classifiers by SGD on augmented views."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt, MinLen
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError
from solo_ext.core.types import LearningRate, NonNegativeFloat, PositiveInt
from solo_ext.data.loaders import eval_mode
from solo_ext.data.reading import targets_of
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import pooled
from solo_ext.lab.evaluation.linear import holdout_mask
from solo_ext.lab.evaluation.protocol import Row, accuracies
from solo_ext.lab.evaluation.supervised import (
    BASE_BATCH,
    SupervisedProtocol,
    seeded,
)


class LinearAugmented(SupervisedProtocol):
    """Settings of ``eval linear_augmented``: SGD on augmented views, with a frozen backbone.

    Momentum 0.9, a cosine schedule to 0, ``weight_decay`` of weights and biases. Every rate of
    ``lr``, given for a batch of 256, has two classifiers on the same features: the first is trained
    on all images, the second without those held out. The rate is chosen whose second classifier is
    best on the fixed views of the held-out images, on a tie the smallest; its first is tested.

    >>> LinearAugmented(epochs=10, lr=[0.1, 1.0]).batch_size
    256
    """

    title: ClassVar[str] = "Linear probe, SGD on augmented views"
    file: ClassVar[str] = "linear_augmented.safetensors"

    epochs: PositiveInt = 100
    lr: Annotated[list[LearningRate], MinLen(1)] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
    weight_decay: NonNegativeFloat = 0.0
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.1

    def trained(self, context: EvalContext) -> tuple[Row, nn.Module]:
        rates, width = sorted(self.lr), context.model.features_dim
        targets = torch.as_tensor(targets_of(context.train))
        held = holdout_mask(targets.numpy(), self.holdout, self.seed)
        if len(rates) > 1 and not bool(held.any()):
            raise ConfigError(
                "lr",
                self.lr,
                "no class has two training images, so none can be held out to choose a rate",
                "give one rate",
            )
        loader, backbone = self.loader(context), context.backbone().to(context.device)
        scaled = [rate * self.batch_size / BASE_BATCH for rate in rates]
        if len(rates) > 1:
            scaled *= 2
        with seeded(self.seed):
            heads = nn.ModuleList(nn.Linear(width, len(context.class_names)) for _ in scaled)
        for parameter in heads.parameters():
            # Cross-entropy is convex in a linear classifier, so all may start at zero.
            nn.init.zeros_(parameter)
        heads.to(context.device)
        final, choosing = heads[: len(rates)], heads[len(rates) :]
        groups = [{"params": h.parameters(), "lr": r} for h, r in zip(heads, scaled, strict=True)]
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=self.weight_decay)

        def loss(indices: Tensor, views: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad(), eval_mode(backbone), self.autocast(views.device):
                features = pooled(backbone(views), len(views))
            total = features.new_zeros(())
            for head in final:
                total = total + F.cross_entropy(head(features), targets)
            seen = (~held[indices]).to(features)
            for head in choosing:
                own = F.cross_entropy(head(features), targets, reduction="none")
                total = total + (own * seen).sum() / seen.sum().clamp_min(1)
            return total

        self.train(context, loader, heads, optimizer, loss, heads_only=True)
        heads.cpu()
        (x, y), (x_test, y_test) = context.features.train, context.features.test
        chosen, about = 0, {}
        with torch.no_grad():
            if choosing:
                rows = x[held].float()
                scores = [accuracies(head(rows), y[held])["acc1"] for head in choosing]
                chosen = scores.index(max(scores))
                shown = (f"{r:g}: {s:.2f}" for r, s in zip(rates, scores, strict=True))
                about = {"held_out": ", ".join(shown)}
            logits = final[chosen](x_test.float())
        if not bool(logits.isfinite().all()):
            problem = "the answers of the classifiers are not finite; take smaller ones"
            raise self.diverged(context, f"lr={self.lr}: {problem}")
        found = accuracies(logits, y_test)
        return {**found, "lr": rates[chosen], "epochs": self.epochs, **about}, final[chosen]
