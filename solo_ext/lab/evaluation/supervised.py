"""Protocols that train with labels on augmented views: linear classifiers, or the whole network."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Gt, Le, Lt, MinLen
from lightning.pytorch.utilities.seed import isolate_rng
from safetensors.torch import save_file
from timm.data import Mixup  # type: ignore[attr-defined]
from timm.models import group_parameters  # type: ignore[attr-defined]
from timm.optim import (  # type: ignore[attr-defined]
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.scheduler import CosineLRScheduler  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim import Optimizer
from torchvision.models import ResNet

from solo_ext.config.schema import Augmentation, Chance, Seed, Streaming, View
from solo_ext.core.draws import derive_seed
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import atomic_write, refuse_link
from solo_ext.core.types import LearningRate, NonNegativeFloat, PositiveInt, ProbabilityBelowOne
from solo_ext.data.loaders import ResumableLoader, eval_mode
from solo_ext.data.reading import targets_of
from solo_ext.data.transforms import pretrain_transform
from solo_ext.data.views import EpochSampler, TrainingViews, shard_starts
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.features import pooled
from solo_ext.lab.evaluation.linear import holdout_mask
from solo_ext.lab.evaluation.protocol import Protocol, Row, accuracies

_BASE_BATCH = 256
"""Learning rates are given for this batch size and scaled by batch / 256, as in solo-learn."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of indices (B,), views (B, 3, H, W) and targets (B,) that returns the mean loss."""
_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_RESNET = {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)\.(\d+)"}
"""timm's layer groups for torchvision's ResNets, which use timm's names but define no groups."""
_CLASSIFIER = "/head."
"""Prefix of the classifier's parameters beside a backbone's own, which may have a ``head`` too."""


class SupervisedProtocol(Protocol):
    """Base class of the two protocols below; by default views are random crops and flips.

    >>> Finetune().augmentation.horizontal_flip, SupervisedProtocol.by_default
    (Chance(prob=0.5), False)
    """

    by_default: ClassVar[bool] = False
    file: ClassVar[str]
    """Name of the file with the weights that ``save`` writes."""

    epochs: PositiveInt
    batch_size: PositiveInt = 256
    augmentation: View = View(horizontal_flip=Chance(prob=0.5))
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    seed: Seed = 0
    save: bool = False

    def unfit(self, context: EvalContext) -> ConfigError | None:
        if context.cfg.data.unreadable != "skip":
            return super().unfit(context)
        # The next readable image replaces a skipped one, and would be trained on twice.
        problem = f"{self.title} needs every image, and this leaves some out"
        remedy = "remove them, and take refuse, or name protocols on features alone"
        return ConfigError("data.unreadable", "skip", problem, remedy)

    @abstractmethod
    def trained(self, context: EvalContext) -> tuple[Row, nn.Module]:
        """Trains; returns the row, and the module to save."""

    def run(self, context: EvalContext) -> list[Row]:
        """One row: ``acc1`` and ``acc5`` after the last epoch, and the numbers of :meth:`trained`.

        Raises:
            UserError: settings that do not fit, or the training diverged.
        """
        row, module = self.trained(context)
        if self.save:
            tensors = {k: v.cpu().contiguous() for k, v in module.state_dict().items()}
            metadata = {
                "backbone": json.dumps(context.cfg.backbone.model_dump()),
                "classes": json.dumps(context.class_names),
            }
            context.out.mkdir(parents=True, exist_ok=True)
            save_file(tensors, refuse_link(context.out / self.file), metadata)
            row["saved"] = self.file
        self.checkpoint(context).unlink(missing_ok=True)
        return [row]

    def diverged(self, context: EvalContext, problem: str) -> UserError:
        """Deletes the checkpoint, which would diverge again if resumed, and returns the error."""
        self.checkpoint(context).unlink(missing_ok=True)
        return UserError(problem)

    def checkpoint(self, context: EvalContext) -> Path:
        """Path of the checkpoint of every epoch, with a digest of what the numbers depend on."""
        data, settings = context.cfg.data, self.model_dump(exclude={"save"})
        images = context.fingerprints, [str(data.train_path), str(data.val_path)]
        digest = context.digest(type(self).__name__, settings, images)
        return context.out / f".unfinished-{digest}.pt"

    def loader(self, context: EvalContext) -> ResumableLoader:
        """Batches ``(indices, [views], targets)``; an incomplete last batch is dropped.

        Order and views depend only on (seed, epoch, index), not on the number of workers.
        """
        count = len(context.train)
        if self.batch_size > count:
            problem = f"the training set has {count} images"
            raise ConfigError("batch_size", self.batch_size, problem, "take a smaller batch")
        view = {**self.augmentation.model_dump(), **context.cfg.augmentations[0].model_dump()}
        augmentation = Augmentation(**view, num_crops=1)
        transform = pretrain_transform(context.cfg.data.dataset, [augmentation])
        streaming = context.cfg.data.streaming or Streaming()
        return ResumableLoader(
            TrainingViews(context.train, transform, self.seed),
            # One process trains, even if several have extracted the features.
            EpochSampler(
                count,
                self.seed,
                num_replicas=1,
                rank=0,
                shards=shard_starts(context.train),
                shards_at_once=streaming.shuffle_shards,
            ),
            self.batch_size,
            context.cfg.data.num_workers,
            context.cfg.data.start_method,
        )

    def autocast(self, device: torch.device) -> torch.autocast:
        """Context manager of mixed precision; ``precision`` uses Lightning's names."""
        mixed = self.precision != "32-true"
        return torch.autocast(device.type, dtype=_DTYPES.get(self.precision), enabled=mixed)

    def train(
        self,
        context: EvalContext,
        loader: ResumableLoader,
        module: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        warmup_epochs: float = 0.0,
        heads_only: bool = False,
    ) -> float:
        """Trains a module; continues after the last finished epoch of an earlier, stopped call.

        Random numbers come from (seed, epoch), so that training in parts gives the same result.
        Rates follow :func:`_cosine_schedule`. With ``heads_only`` the module consists of linear
        classifiers, some of which may diverge. Returns the mean loss of the last epoch.

        Raises:
            UserError: loss or weights of an epoch are not finite.
        """
        device, steps, progress = context.device, len(loader), context.report(self.title)
        schedule = _cosine_schedule(optimizer, steps * self.epochs, round(steps * warmup_epochs))
        scaled = self.precision == "16-mixed" and not heads_only
        scaler = torch.amp.GradScaler(torch.device(device).type, enabled=scaled)
        first, mean, checkpoint = 0, float("nan"), self.checkpoint(context)
        state: dict[str, Any] = {}
        # torch raises many types of error for a damaged file; the training then starts anew.
        with contextlib.suppress(Exception):
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if state:
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])
            scaler.load_state_dict(state["scaler"])
            first, mean = state["epochs"], state["loss"]
        context.out.mkdir(parents=True, exist_ok=True)
        # Notice a folder that cannot be written before an epoch is trained for nothing.
        tempfile.TemporaryFile(dir=context.out).close()
        for epoch in range(first, self.epochs):
            loader.order.set_epoch(epoch)
            module.train()
            total = torch.zeros((), device=device)
            with _seeded(derive_seed(self.seed, epoch)):
                for step, (indices, (views,), targets) in enumerate(loader, start=epoch * steps):
                    schedule.step_update(step)
                    optimizer.zero_grad()
                    value = loss(indices, views.to(device), targets.to(device))
                    scaler.scale(value).backward()  # type: ignore[no-untyped-call]
                    scaler.step(optimizer)
                    scaler.update()
                    total += value.detach()
                    progress(step + 1, steps * self.epochs)
            mean = float(total) / steps
            # The loss was computed before the last update, so check the weights as well.
            tensors = [total, *module.state_dict().values()]
            if not heads_only and not all(bool(t.isfinite().all()) for t in tensors):
                raise self.diverged(
                    context,
                    f"the loss or the weights of epoch {epoch + 1} are not finite; take a smaller "
                    "lr, or longer warmup_epochs",
                )
            state = {
                "module": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "epochs": epoch + 1,
                "loss": mean,
            }
            atomic_write(checkpoint, functools.partial(torch.save, state))
        return mean


def _cosine_schedule(optimizer: Optimizer, steps: int, warmup: int = 0) -> Any:
    """timm's schedule by step: linear from 0 over ``warmup`` steps, then half a cosine to 0.

    Call ``step_update(n)`` before step n, counted from 0. A group's ``lr_scale`` multiplies its
    rate.
    """
    return CosineLRScheduler(
        optimizer,
        t_initial=max(steps - warmup, 1),
        warmup_t=warmup,
        warmup_prefix=True,
        t_in_epochs=False,
    )


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch and numpy, which timm's Mixup uses, and restores both afterwards."""
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield


class LinearAugmented(SupervisedProtocol):
    """Settings of ``eval linear_augmented``: SGD on augmented views, with a frozen backbone.

    SGD has momentum 0.9, a cosine schedule to 0, and ``weight_decay`` of weights and biases. Every
    rate of ``lr``, given for a batch of 256, has two classifiers on the same features: the first is
    trained on all images, the second without the held-out ones. The chosen rate is the one whose
    second classifier is best on the fixed views of the held-out images, on a tie the smallest; its
    first classifier is tested.

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
        scaled = [rate * self.batch_size / _BASE_BATCH for rate in rates]
        if len(rates) > 1:
            scaled *= 2
        with _seeded(self.seed):
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


class Classifier(nn.Module):
    """Logits ``W pool(backbone(x)) + b``, (B, C), of images (B, 3, H, W), with fp32 features.

    W is initialised from a normal distribution of standard deviation 0.01, b with zeros.

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
        # timm groups the parameters of a whole model, whose classifier follows the backbone.
        named = [
            *self.backbone.named_parameters(),
            *((_CLASSIFIER + n, p) for n, p in self.head.named_parameters()),
        ]
        whole: Any = SimpleNamespace(named_parameters=lambda: iter(named))
        layers: dict[str, int] = group_parameters(whole, self._matcher(), reverse=True)
        found = {
            "head." + n.removeprefix(_CLASSIFIER)
            if n.startswith(_CLASSIFIER)
            else f"backbone.{n}": layer
            for n, layer in layers.items()
        }
        return found.__getitem__

    def param_groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Parameter groups with timm's ``weight_decay`` and ``lr_scale``.

        Layers are numbered 0 ... L, where L is the classifier. The rate of layer l is multiplied by
        ``layer_decay ** (L - l)``. Vectors, and parameters that the backbone's ``no_weight_decay``
        names, are not decayed.

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
        with _seeded(self.seed):
            model = Classifier(context.backbone(), context.model.features_dim, classes)
        model.to(context.device)
        groups = model.param_groups(self.weight_decay, self.layer_decay)
        rate = self.lr * self.batch_size / _BASE_BATCH
        optimizer: Optimizer
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
        """Logits (n, C), fp32, and targets (n,) of all batches of a loader, in eval mode."""
        model.eval()
        parts: list[tuple[Tensor, Tensor]] = []
        with self.autocast(torch.device(device)):
            for images, targets in loader:
                parts.append((model(images.to(device)).float().cpu(), targets.cpu()))
        logits, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        return logits, targets
