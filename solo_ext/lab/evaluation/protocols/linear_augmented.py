"""``eval linear_augmented``."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Lt, MinLen
from safetensors.torch import save_file
from torch import Tensor

from solo_ext.config.schema import Seed, View
from solo_ext.config.types import LearningRate, NonNegativeFloat, PositiveInt
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import refuse_link
from solo_ext.data.images import targets_of
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.linear import holdout_mask
from solo_ext.lab.evaluation.protocols.base import BackboneProtocol, Row
from solo_ext.lab.evaluation.subject import EvalContext
from solo_ext.lab.evaluation.supervised.classifier import accuracies
from solo_ext.lab.evaluation.supervised.schedule import BASE_BATCH, Precision, seeded
from solo_ext.lab.evaluation.supervised.side_by_side import Heads, LinearHeadSweep
from solo_ext.lab.evaluation.supervised.unfinished import EvalCheckpoint
from solo_ext.lab.evaluation.supervised.views import STANDARD_VIEW, training_loader

FILE = "linear_augmented.safetensors"


class LinearAugmented(BackboneProtocol):
    """Settings of ``eval linear_augmented``: SGD on augmented views, the backbone frozen."""

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

    def run(self, subject: EvalContext) -> list[Row]:
        """One row: ``acc1`` and ``acc5`` after the last epoch, ``lr``, how it was chosen.

        Every rate of ``lr``, given for a batch of 256, has two classifiers on the same features:
        one is trained on all images, the other leaves out those held out. Of the rates the one is
        chosen whose second classifier is best on the fixed views of the images held out, the
        smallest of equals; its first is what is tested.

        Raises:
            UserError: settings that do not fit, or every training diverged.
        """
        targets = torch.as_tensor(targets_of(subject.train))
        held = self._held(targets)
        loader = training_loader(
            subject, self.augmentation, batch_size=self.batch_size, seed=self.seed
        )
        rates = sorted(self.lr)
        scaled = [rate * self.batch_size / BASE_BATCH for rate in rates]
        with seeded(self.seed):
            heads = Heads(subject.features_dim, subject.num_classes, scaled, len(rates) > 1)
        heads.to(subject.device)
        backbone = subject.backbone().requires_grad_(False).to(subject.device)
        unfinished = EvalCheckpoint(subject, self)
        training = LinearHeadSweep(self.epochs, self.weight_decay, self.precision, subject.device)
        report = subject.report("linear classifiers")
        training.train(backbone, heads, loader, held, unfinished, report)
        heads.cpu()
        try:
            row = self._measured(heads, subject.features, held, rates)
        except UserError:
            # Another call is to begin anew, not behind this end.
            unfinished.remove()
            raise
        if self.save:
            self._save(subject, heads, rates.index(row["lr"]))
            row["saved"] = FILE
        unfinished.remove()
        return [row]

    @torch.no_grad()
    def _measured(self, heads: Heads, features: Features, held: Tensor, rates: list[float]) -> Row:
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
        return {**found, "lr": rates[chosen], "epochs": self.epochs, **about}

    def _held(self, targets: Tensor) -> Tensor:
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

    def _save(self, subject: EvalContext, heads: Heads, chosen: int) -> None:
        weights = {k: v.contiguous() for k, v in heads.final[chosen].state_dict().items()}
        subject.out.mkdir(parents=True, exist_ok=True)
        save_file(
            weights, refuse_link(subject.out / FILE), {"classes": json.dumps(subject.class_names)}
        )
