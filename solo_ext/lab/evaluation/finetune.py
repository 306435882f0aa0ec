"""``eval finetune``: the whole network is trained with labels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from timm.data import Mixup  # type: ignore[attr-defined]
from timm.models import group_parameters  # type: ignore[attr-defined]
from timm.optim import (  # type: ignore[attr-defined]
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from torch import Tensor, nn
from torchvision.models import ResNet

from solo_ext.core.errors import ConfigError
from solo_ext.core.types import (
    LearningRate,
    NonNegativeFloat,
    PositiveInt,
    ProbabilityBelowOne,
)
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import pooled
from solo_ext.lab.evaluation.protocol import Row, accuracies
from solo_ext.lab.evaluation.supervised import (
    BASE_BATCH,
    SupervisedProtocol,
    seeded,
)

_RESNET = {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)\.(\d+)"}
"""How torchvision's ResNets are grouped into layers; they have timm's names but do not say it."""


class Classifier(nn.Module):
    """Logits ``W pool(backbone(x)) + b``, (B, C), of images (B, 3, H, W), with fp32 features.

    W starts at normal weights of deviation 0.01, b at zero.

    >>> model = Classifier(nn.Conv2d(3, 16, 3), 16, 10)
    >>> model(torch.ones(4, 3, 8, 8)).shape
    torch.Size([4, 10])
    """

    def __init__(self, backbone: nn.Module, features_dim: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(features_dim, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(pooled(self.backbone(x), len(x)))
        return logits

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Maps a parameter's name to the number of its layer, in timm's interface."""
        # timm groups a whole model, with a classifier after the backbone.
        named = [
            *self.backbone.named_parameters(),
            *((f"head.{n}", p) for n, p in self.head.named_parameters()),
        ]
        whole: Any = SimpleNamespace(named_parameters=lambda: iter(named))
        layers: dict[str, int] = group_parameters(whole, self._matcher(), reverse=True)
        found = {n if n.startswith("head.") else f"backbone.{n}": i for n, i in layers.items()}
        return found.__getitem__

    def param_groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Parameter groups with timm's ``weight_decay`` and ``lr_scale``.

        Of the layers 0 ... L, where L is the classifier, layer l learns at
        ``layer_decay ** (L - l)`` times the rate. Vectors, and parameters that the backbone names,
        are not decayed.

        Source:
            BEiT (Bao et al., 2021, arXiv 2106.08254).
        """
        named = getattr(self.backbone, "no_weight_decay", set)
        spared = [f"backbone.{n}" for n in named()]
        if layer_decay == 1:
            groups = param_groups_weight_decay(self, weight_decay, no_weight_decay_list=spared)
            return [g for g in groups if g["params"]]
        if self._matcher() is None:
            raise ConfigError(
                "layer_decay",
                layer_decay,
                f"the layers of a {type(self.backbone).__name__} are not known",
                "layer_decay=1 trains all of them at one rate",
            )
        return list(
            param_groups_layer_decay(
                self, weight_decay, no_weight_decay_list=spared, layer_decay=layer_decay
            )
        )

    def _matcher(self) -> Any:
        if isinstance(self.backbone, ResNet):
            return _RESNET
        return getattr(self.backbone, "group_matcher", lambda coarse: None)(coarse=False)


class Finetune(SupervisedProtocol):
    """Settings of ``eval finetune``: the whole network is trained with labels.

    ``lr`` is for a batch of 256 and scaled by batch / 256. Accuracies are measured after the last
    epoch; the test split is used for nothing else.

    >>> Finetune(epochs=10, optimizer="sgd", lr=0.01).batch_size
    256
    """

    title: ClassVar[str] = "Fine-tuning"
    file: ClassVar[str] = "finetune.safetensors"

    epochs: PositiveInt = 50
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: LearningRate = 1e-3
    weight_decay: NonNegativeFloat = 0.05
    layer_decay: Annotated[float, Gt(0), Le(1)] = 0.75
    warmup_epochs: NonNegativeFloat | None = None
    label_smoothing: ProbabilityBelowOne = 0.1
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0

    def trained(self, context: EvalContext) -> tuple[Row, nn.Module]:
        warmup = self.epochs / 10 if self.warmup_epochs is None else self.warmup_epochs
        if warmup >= self.epochs:
            raise ConfigError(
                "warmup_epochs",
                self.warmup_epochs,
                f"the training ends after {self.epochs} epochs",
                "take fewer; null takes a tenth of epochs",
            )
        mixes = bool(self.mixup or self.cutmix)
        if mixes and self.batch_size % 2:
            raise ConfigError(
                "batch_size", self.batch_size, "mixup pairs the images of a batch", "make it even"
            )
        loader, classes = self.loader(context), len(context.class_names)
        with seeded(self.seed):
            model = Classifier(context.backbone(), context.model.features_dim, classes)
        model.to(context.device)
        groups = model.param_groups(self.weight_decay, self.layer_decay)
        rate = self.lr * self.batch_size / BASE_BATCH
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=self.weight_decay)
        else:
            optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
        smoothing = self.label_smoothing
        mixup = Mixup(self.mixup, self.cutmix, label_smoothing=smoothing, num_classes=classes)  # type: ignore[no-untyped-call]

        def loss(_: Tensor, views: Tensor, targets: Tensor) -> Tensor:
            if mixes:
                # timm's mixup also smooths the labels.
                views, targets = mixup(views, targets)
            with self.autocast(views.device):
                logits = model(views)
            return F.cross_entropy(
                logits.float(), targets, label_smoothing=0.0 if mixes else smoothing
            )

        mean = self.train(context, loader, model, optimizer, loss, warmup_epochs=warmup)
        logits, targets = self.predicted(model, context.loader(context.test), context.device)
        if not bool(logits.isfinite().all()):
            raise self.diverged(
                context, "the answers after the last epoch are not finite; take a smaller lr"
            )
        return {**accuracies(logits, targets), "train_loss": mean, "epochs": self.epochs}, model

    @torch.no_grad()
    def predicted(self, model: nn.Module, loader: Any, device: str) -> tuple[Tensor, Tensor]:
        """Logits (n, C), fp32, and targets (n,) of ``(images, targets)``, in eval mode."""
        model.eval()
        parts: list[tuple[Tensor, Tensor]] = []
        with self.autocast(torch.device(device)):
            for images, targets in loader:
                parts.append((model(images.to(device)).float().cpu(), targets.cpu()))
        logits, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        return logits, targets
