"""``eval finetune``."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from safetensors.torch import save_file
from timm.data import Mixup  # type: ignore[attr-defined]

from solo_ext.config.schema import Seed, View
from solo_ext.config.types import (
    LearningRate,
    NonNegativeFloat,
    PositiveInt,
    Probability,
    ProbabilityBelowOne,
)
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import refuse_link
from solo_ext.lab.evaluation.protocols.base import BackboneProtocol, Row
from solo_ext.lab.evaluation.subject import EvalContext
from solo_ext.lab.evaluation.supervised.classifier import Classifier, accuracies
from solo_ext.lab.evaluation.supervised.drop_path import with_drop_path
from solo_ext.lab.evaluation.supervised.fine_tuning import FineTuning, diverged, predicted
from solo_ext.lab.evaluation.supervised.schedule import BASE_BATCH, Precision, seeded
from solo_ext.lab.evaluation.supervised.unfinished import EvalCheckpoint
from solo_ext.lab.evaluation.supervised.views import STANDARD_VIEW, training_loader

FILE = "finetune.safetensors"


class Finetune(BackboneProtocol):
    """Settings of ``eval finetune``: the whole network is trained with labels."""

    title: ClassVar[str] = "Fine-tuning"
    by_default: ClassVar[bool] = False

    epochs: PositiveInt = 50
    batch_size: PositiveInt = 256
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: LearningRate = 1e-3
    weight_decay: NonNegativeFloat = 0.05
    layer_decay: Annotated[float, Gt(0), Le(1)] = 0.75
    warmup_epochs: NonNegativeFloat | None = None
    label_smoothing: ProbabilityBelowOne = 0.1
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    drop_path: ProbabilityBelowOne = 0.0
    random_erasing: Probability = 0.0
    augmentation: View = STANDARD_VIEW
    precision: Precision = "32-true"
    seed: Seed = 0
    save: bool = False

    def run(self, subject: EvalContext) -> list[Row]:
        """One row: ``acc1``, ``acc5``, ``train_loss`` of the last epoch, ``epochs``.

        ``lr`` is for a batch of 256 and scaled by batch / 256. The accuracies are those after the
        last epoch; the test split serves nothing else.

        Raises:
            UserError: settings that do not fit, or the training diverged.
        """
        self._check()
        loader = training_loader(
            subject,
            self.augmentation,
            batch_size=self.batch_size,
            seed=self.seed,
            random_erasing=self.random_erasing,
        )
        with seeded(self.seed):
            model = self._model(subject).to(subject.device)
        optimizer = self._optimizer(model)
        unfinished = EvalCheckpoint(subject, self)
        training = FineTuning(
            self.epochs,
            self._warmup(),
            self._mixup(subject.num_classes),
            self.label_smoothing,
            self.precision,
            self.seed,
            subject.device,
        )
        loss = training.train(model, loader, optimizer, unfinished, subject.report("fine-tuning"))
        logits, targets = predicted(
            model, subject.loader(subject.test), subject.device, self.precision
        )
        if not bool(logits.isfinite().all()):
            # Another call is to begin anew, not behind this end.
            unfinished.remove()
            raise diverged("answers after the last epoch are")
        row: Row = {**accuracies(logits, targets), "train_loss": loss, "epochs": self.epochs}
        if self.save:
            about = {"backbone": subject.cfg["backbone"], "classes": subject.class_names}
            metadata = {k: json.dumps(v) for k, v in about.items()}
            weights = {k: v.cpu().contiguous() for k, v in model.state_dict().items()}
            subject.out.mkdir(parents=True, exist_ok=True)
            save_file(weights, refuse_link(subject.out / FILE), metadata)
            row["saved"] = FILE
        unfinished.remove()
        return [row]

    def _model(self, subject: EvalContext) -> Classifier:
        backbone = with_drop_path(subject, self.drop_path)
        return Classifier(backbone, subject.features_dim, subject.num_classes)

    def _optimizer(self, model: Classifier) -> torch.optim.Optimizer:
        groups = model.param_groups(self.weight_decay, self.layer_decay)
        rate = self.lr * self.batch_size / BASE_BATCH
        if self.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=rate, weight_decay=self.weight_decay)
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)

    def _mixup(self, num_classes: int) -> Mixup | None:
        if not self.mixup and not self.cutmix:
            return None
        return Mixup(  # type: ignore[no-untyped-call]
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            label_smoothing=self.label_smoothing,
            num_classes=num_classes,
        )

    def _warmup(self) -> float:
        return self.epochs / 10 if self.warmup_epochs is None else self.warmup_epochs

    def _check(self) -> None:
        if self._warmup() >= self.epochs:
            raise ConfigError(
                "warmup_epochs",
                self.warmup_epochs,
                f"the training ends after {self.epochs} epochs",
                "take fewer; null takes a tenth of epochs",
            )
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ConfigError(
                "batch_size", self.batch_size, "mixup pairs the images of a batch", "make it even"
            )
