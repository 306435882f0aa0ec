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

from solo_ext import host
from solo_ext.config.schema import Seed, View
from solo_ext.core.draws import mix
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.types import (
    LearningRate,
    NonNegativeFloat,
    PositiveInt,
    Probability,
    ProbabilityBelowOne,
)
from solo_ext.host.backbones import build_backbone
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import pooled
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

FILE = "finetune.safetensors"
_RESNET = {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)\.(\d+)"}
"""How torchvision's ResNets are grouped into layers; they have timm's names but do not say it."""


class Classifier(nn.Module):
    """Logits ``W pool(backbone(x)) + b``, (B, C), fp32 features.

    The classifier starts at normal weights of deviation 0.01 and zero bias, drawn from torch's
    generator.

    Args:
        backbone: images (B, 3, H, W) to (B, D) or (B, D, H, W).
        features_dim: D.
        num_classes: C.

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

        Raises:
            ConfigError: a decay below 1 for a backbone whose layers are unknown.

        Source:
            BEiT (Bao et al., 2021, arXiv 2106.08254).
        """
        named = getattr(self.backbone, "no_weight_decay", None)
        spared = [f"backbone.{n}" for n in (named() if callable(named) else ())]
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
        groups = param_groups_layer_decay(
            self, weight_decay, no_weight_decay_list=spared, layer_decay=layer_decay
        )
        return list(groups)

    def _matcher(self) -> Any:
        own = getattr(self.backbone, "group_matcher", None)
        if callable(own):
            return own(coarse=False)
        return _RESNET if isinstance(self.backbone, ResNet) else None


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

    def run(self, context: EvalContext) -> list[Row]:
        """One row: ``acc1``, ``acc5``, ``train_loss`` of the last epoch, ``epochs``.

        ``lr`` is for a batch of 256 and scaled by batch / 256. Accuracies are measured after the
        last epoch; the test split is used for nothing else.

        Raises:
            UserError: settings that do not fit, or the training diverged.
        """
        warmup = self.epochs / 10 if self.warmup_epochs is None else self.warmup_epochs
        if warmup >= self.epochs:
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
        checkpoint = EvalCheckpoint(context, self)
        model, loss = self._train(context, warmup, checkpoint)
        logits, targets = predicted(
            model, context.loader(context.test), context.device, self.precision
        )
        if not bool(logits.isfinite().all()):
            # A resumed training would end here again, so let the next call start over.
            checkpoint.remove()
            raise _diverged("answers after the last epoch are")
        row: Row = {**accuracies(logits, targets), "train_loss": loss, "epochs": self.epochs}
        if self.save:
            save_weights(
                context, FILE, model.state_dict(), backbone=context.cfg.backbone.model_dump()
            )
            row["saved"] = FILE
        checkpoint.remove()
        return [row]

    def _train(
        self, context: EvalContext, warmup: float, checkpoint: EvalCheckpoint
    ) -> tuple[Classifier, float]:
        """The trained network and the mean loss of its last epoch.

        Continues after the last finished epoch of an earlier, stopped call. Random numbers come
        from (seed, epoch), so that training in parts gives the same result as in one go.
        """
        device = context.device
        loader = training_loader(
            context,
            self.augmentation,
            batch_size=self.batch_size,
            seed=self.seed,
            random_erasing=self.random_erasing,
        )
        with seeded(self.seed):
            backbone = with_drop_path(context, self.drop_path)
            model = Classifier(backbone, context.features_dim, context.num_classes).to(device)
        optimizer = self._optimizer(model)
        mixup = self._mixup(context.num_classes)
        steps, progress = len(loader), context.report("fine-tuning")
        schedule = cosine_schedule(optimizer, steps * self.epochs, round(steps * warmup))
        scaler = torch.amp.GradScaler(
            torch.device(device).type, enabled=self.precision == "16-mixed"
        )
        first, loss = 0, float("nan")
        state = checkpoint.load()
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scaler.load_state_dict(state["scaler"])
            first, loss = state["epochs"], state["loss"]
        for epoch in range(first, self.epochs):
            loader.order.set_epoch(epoch)
            model.train()
            summed = torch.zeros((), device=device)
            with seeded(mix(self.seed, epoch), device):
                for step, (_, (views,), targets) in enumerate(loader, start=epoch * steps):
                    schedule.step_update(step)
                    optimizer.zero_grad()
                    value = self._loss(model, mixup, views.to(device), targets.to(device))
                    scaler.scale(value).backward()  # type: ignore[no-untyped-call]
                    scaler.step(optimizer)
                    scaler.update()
                    summed += value.detach()
                    if progress is not None:
                        progress(step + 1, steps * self.epochs)
            loss = float(summed) / steps
            if not torch.tensor(loss).isfinite():
                raise _diverged(f"loss of epoch {epoch + 1} is")
            # The loss was computed before the last update, so check the weights as well.
            if not all(bool(p.isfinite().all()) for p in model.state_dict().values()):
                raise _diverged(f"weights after epoch {epoch + 1} are")
            state = {"epochs": epoch + 1, "loss": loss, "model": model.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            checkpoint.save(state)
        return model, loss

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

    def _loss(
        self, model: Classifier, mixup: Mixup | None, views: Tensor, targets: Tensor
    ) -> Tensor:
        smoothing = self.label_smoothing
        if mixup is not None:
            # timm's mixup also smooths the labels.
            views, targets = mixup(views, targets)
            smoothing = 0.0
        with autocast(str(views.device), self.precision):
            logits = model(views)
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


def with_drop_path(context: EvalContext, rate: float) -> nn.Module:
    """The backbone with its weights, rebuilt with ``drop_path_rate``.

    Layers are dropped with a probability that grows linearly to ``rate`` (Huang et al., ECCV
    2016, arXiv 1603.09382). A rate of 0 gives :meth:`EvalContext.backbone` with its own rate.

    Raises:
        ConfigError: the backbone has no stochastic depth.
    """
    own = context.backbone()
    if not rate:
        return own
    about = context.cfg.backbone
    kwargs = {k: v for k, v in about.kwargs.items() if k != "pretrained"}
    none = ConfigError(
        "drop_path",
        rate,
        f"the backbone {about.name!r} has no stochastic depth",
        "leave it at 0",
    )
    try:
        built, _ = build_backbone(
            host.load().backbones,
            about.name,
            {**kwargs, "drop_path_rate": rate},
            method=context.cfg.method,
            dataset=context.model.cfg.data.dataset,
        )
    except (ConfigError, TypeError) as error:
        raise none from error
    if not any(type(m).__name__ == "DropPath" for m in built.modules()):
        raise none
    built.load_state_dict(own.state_dict())
    return built


@torch.no_grad()
def predicted(
    model: Classifier, loader: Any, device: str, precision: Precision = "32-true"
) -> tuple[Tensor, Tensor]:
    """Logits (n, C), fp32, and targets (n,) of a loader of ``(images, targets)``, in eval mode.

    >>> batches = 2 * [(torch.ones(4, 3, 8, 8), torch.arange(4))]
    >>> logits, targets = predicted(Classifier(nn.Identity(), 3, 10), batches, "cpu")
    >>> logits.shape, targets.shape
    (torch.Size([8, 10]), torch.Size([8]))
    """
    model.eval()
    parts: list[tuple[Tensor, Tensor]] = []
    for images, targets in loader:
        with autocast(device, precision):
            logits = model(images.to(device))
        parts.append((logits.float().cpu(), targets))
    logits, targets = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(targets)


def _diverged(what: str) -> UserError:
    return UserError(f"the {what} not finite; take a smaller lr, or longer warmup_epochs")
