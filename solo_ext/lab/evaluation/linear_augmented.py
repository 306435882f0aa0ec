"""``eval linear_augmented``: trains linear classifiers by SGD on augmented views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt, MinLen
from torch import Tensor, nn

from solo_ext.config.schema import Seed, View
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.types import LearningRate, NonNegativeFloat, PositiveInt
from solo_ext.data.reading import targets_of
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import Features, pooled
from solo_ext.lab.evaluation.linear import holdout_mask
from solo_ext.lab.evaluation.protocol import BackboneProtocol, Row
from solo_ext.lab.evaluation.supervised import (
    BASE_BATCH,
    STANDARD_VIEW,
    EvalCheckpoint,
    Precision,
    accuracies,
    autocast,
    cosine_schedule,
    save_weights,
    seeded,
    training_loader,
)
from solo_ext.memory.state import eval_mode

FILE = "linear_augmented.safetensors"
_MOMENTUM = 0.9


class LinearHeadSweep(nn.Module):
    """Linear classifiers for several rates, to choose a rate by held-out images.

    For every rate one classifier is trained on all images; if a rate is to be chosen, a second one
    is trained without the held-out images. All start at zero: cross-entropy is convex in them.

    Args:
        features_dim: D.
        num_classes: C.
        rates: learning rates of SGD.
        choosing: whether to train the second classifiers.

    >>> heads = LinearHeadSweep(8, 3, [0.1, 1.0], choosing=True)
    >>> loss = heads.loss(torch.ones(4, 8), torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 0, 1]))
    >>> len(heads.param_groups()), round(loss.item(), 4)
    (4, 4.3944)
    """

    def __init__(
        self, features_dim: int, num_classes: int, rates: Sequence[float], choosing: bool
    ) -> None:
        super().__init__()
        self.rates = list(rates)

        def heads() -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(features_dim, num_classes) for _ in rates)

        self.final = heads()
        self.choosing = heads() if choosing else nn.ModuleList()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def param_groups(self) -> list[dict[str, object]]:
        """One group per classifier, with its rate."""
        pairs = [*zip(self.final, self.rates, strict=True), *zip(self.choosing, self.rates)]  # noqa: B905
        return [{"params": list(head.parameters()), "lr": rate} for head, rate in pairs]

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


class LinearAugmented(BackboneProtocol):
    """Settings of ``eval linear_augmented``: SGD on augmented views, with a frozen backbone.

    Momentum 0.9, a cosine schedule to 0, ``weight_decay`` of weights and biases.
    """

    title: ClassVar[str] = "Linear probe, SGD on augmented views"
    by_default: ClassVar[bool] = False

    epochs: PositiveInt = 100
    batch_size: PositiveInt = 256
    lr: Annotated[list[LearningRate], MinLen(1)] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
    weight_decay: NonNegativeFloat = 0.0
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.1
    augmentation: View = STANDARD_VIEW
    precision: Precision = "32-true"
    seed: Seed = 0
    save: bool = False

    def run(self, context: EvalContext) -> list[Row]:
        """One row: ``acc1`` and ``acc5`` after the last epoch, ``lr``, how it was chosen.

        Every rate of ``lr``, given for a batch of 256, has two classifiers on the same features:
        the first is trained on all images, the second without those held out. The rate is chosen
        whose second classifier is best on the fixed views of the held-out images, on a tie the
        smallest; its first classifier is tested.

        Raises:
            UserError: settings that do not fit, or every training diverged.
        """
        held = self._held(torch.as_tensor(targets_of(context.train)))
        rates = sorted(self.lr)
        scaled = [rate * self.batch_size / BASE_BATCH for rate in rates]
        with seeded(self.seed):
            heads = LinearHeadSweep(
                context.features_dim, context.num_classes, scaled, choosing=len(rates) > 1
            )
        heads.to(context.device)
        checkpoint = EvalCheckpoint(context, self)
        self._train(context, heads, held, checkpoint)
        heads.cpu()
        try:
            chosen, row = self._measured(heads, context.features, held, rates)
        except UserError:
            # A resumed training would end here again, so let the next call start over.
            checkpoint.remove()
            raise
        if self.save:
            save_weights(context, FILE, heads.final[chosen].state_dict())
            row["saved"] = FILE
        checkpoint.remove()
        return [row]

    def _held(self, targets: Tensor) -> Tensor:
        """(n,) bool: the images held out to choose the rate."""
        if len(self.lr) == 1:
            return torch.zeros(len(targets), dtype=torch.bool)
        held = holdout_mask(targets.numpy(), self.holdout, self.seed)
        if not bool(held.any()):
            raise ConfigError(
                "lr",
                self.lr,
                "no class has two training images, so none can be held out to choose a rate",
                "give one rate",
            )
        return held

    def _train(
        self, context: EvalContext, heads: LinearHeadSweep, held: Tensor, checkpoint: EvalCheckpoint
    ) -> None:
        """Trains; continues after the last finished epoch of an earlier, stopped call."""
        loader = training_loader(
            context, self.augmentation, batch_size=self.batch_size, seed=self.seed
        )
        backbone = context.backbone().requires_grad_(False).to(context.device)
        steps, progress = len(loader), context.report("linear classifiers")
        optimizer = torch.optim.SGD(
            heads.param_groups(), momentum=_MOMENTUM, weight_decay=self.weight_decay
        )
        schedule = cosine_schedule(optimizer, steps * self.epochs)
        state = checkpoint.load()
        if state is not None:
            heads.load_state_dict(state["heads"])
            optimizer.load_state_dict(state["optimizer"])
        for epoch in range(state["epochs"] if state else 0, self.epochs):
            loader.order.set_epoch(epoch)
            for step, (indices, (views,), targets) in enumerate(loader, start=epoch * steps):
                schedule.step_update(step)
                features = self._features(backbone, views.to(context.device))
                optimizer.zero_grad()
                seen = (~held[indices]).to(features)
                loss = heads.loss(features, targets.to(context.device), seen)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if progress is not None:
                    progress(step + 1, steps * self.epochs)
            done = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save({"epochs": epoch + 1, **done})

    @torch.no_grad()
    def _features(self, backbone: nn.Module, views: Tensor) -> Tensor:
        with eval_mode(backbone), autocast(str(views.device), self.precision):
            return pooled(backbone(views), len(views))

    @torch.no_grad()
    def _measured(
        self, heads: LinearHeadSweep, features: Features, held: Tensor, rates: list[float]
    ) -> tuple[int, Row]:
        """The index of the chosen rate, and its row."""
        chosen, about = 0, {}
        if heads.choosing:
            rows, truth = features.train[held].float(), features.train_targets[held]
            scores = [accuracies(head(rows), truth)["acc1"] for head in heads.choosing]
            chosen = scores.index(max(scores))
            shown = ", ".join(f"{r:g}: {s:.2f}" for r, s in zip(rates, scores, strict=True))
            about = {"held_out": shown}
        logits = heads.final[chosen](features.test.float())
        if not bool(logits.isfinite().all()):
            raise ConfigError(
                "lr", self.lr, "the answers of the classifiers are not finite", "take smaller ones"
            )
        found = accuracies(logits, features.test_targets)
        return chosen, {**found, "lr": rates[chosen], "epochs": self.epochs, **about}
