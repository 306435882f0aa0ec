"""What ``linear_augmented`` and ``finetune`` share: training on the images with their labels."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from safetensors.torch import save_file
from timm.scheduler import CosineLRScheduler  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim import Optimizer

from solo_ext import __version__
from solo_ext.config.schema import Augmentation, Chance, Seed, View
from solo_ext.core.draws import mix
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import atomic_write, refuse_link
from solo_ext.core.types import PositiveInt
from solo_ext.data.loaders import ResumableLoader
from solo_ext.data.transforms import pretrain_transform
from solo_ext.data.views import EpochSampler, TrainingViews
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.protocol import Protocol, Row

BASE_BATCH = 256
"""Rates are given for this batch size and scaled by batch / 256, as in solo-learn."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mean loss of indices (B,), views (B, 3, H, W) and targets (B,)."""
_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class SupervisedProtocol(Protocol):
    """Base of the protocols that train on augmented views; by default random crops and flips.

    Attributes:
        file: name of the file with the weights that ``save`` writes.

    >>> from solo_ext.lab.evaluation.finetune import Finetune
    >>> Finetune().augmentation.horizontal_flip, SupervisedProtocol.by_default
    (Chance(prob=0.5), False)
    """

    by_default: ClassVar[bool] = False
    file: ClassVar[str]

    epochs: PositiveInt
    batch_size: PositiveInt = 256
    augmentation: View = View(horizontal_flip=Chance(prob=0.5))
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    seed: Seed = 0
    save: bool = False

    @abstractmethod
    def trained(self, context: EvalContext) -> tuple[Row, nn.Module]:
        """Trains; returns the row, and the module to save."""

    def run(self, context: EvalContext) -> list[Row]:
        """One row: ``acc1`` and ``acc5`` after the last epoch, and what the training says.

        Raises:
            UserError: settings that do not fit, or the training diverged.
        """
        row, module = self.trained(context)
        if self.save:
            tensors = {k: v.cpu().contiguous() for k, v in module.state_dict().items()}
            about = {
                "backbone": context.cfg.backbone.model_dump(),
                "classes": context.class_names,
            }
            context.out.mkdir(parents=True, exist_ok=True)
            metadata = {k: json.dumps(v) for k, v in about.items()}
            save_file(tensors, refuse_link(context.out / self.file), metadata)
            row["saved"] = self.file
        self.checkpoint(context).unlink(missing_ok=True)
        return [row]

    def diverged(self, context: EvalContext, problem: str) -> UserError:
        """The error of a training that diverged; resumed, it would end so again."""
        self.checkpoint(context).unlink(missing_ok=True)
        return UserError(problem)

    def checkpoint(self, context: EvalContext) -> Path:
        """The file that is written after every epoch; named by what the numbers depend on."""
        data, first = context.cfg.data, context.cfg.augmentations[0]
        key = {
            "solo_ext": __version__,
            "model": context.model.digest,
            "backbone": context.cfg.backbone.model_dump(),
            "protocol": type(self).__name__,
            "settings": self.model_dump(exclude={"save"}),
            "images": context.fingerprints,
            "paths": [str(data.train_path), str(data.val_path)],
            "view": [first.crop_size, first.mean, first.std],
        }
        text = json.dumps(key, sort_keys=True, default=str)
        return context.out / f".unfinished-{hashlib.sha256(text.encode()).hexdigest()[:16]}.pt"

    def loader(self, context: EvalContext) -> ResumableLoader:
        """Batches ``(indices, [views], targets)``; the last, incomplete one of an epoch is dropped.

        Order and views depend only on (seed, epoch, index), not on the number of workers.
        """
        count = len(context.train)
        if self.batch_size > count:
            problem = f"the training set has {count} images"
            raise ConfigError("batch_size", self.batch_size, problem, "take a smaller batch")
        view = {**self.augmentation.model_dump(), **context.cfg.augmentations[0].model_dump()}
        augmentation = Augmentation(**view, num_crops=1)
        transform = pretrain_transform(context.cfg.data.dataset, [augmentation])
        return ResumableLoader(
            TrainingViews(context.train, transform, self.seed),
            # One process trains, even if several have extracted the features.
            EpochSampler(count, self.seed, num_replicas=1, rank=0),
            self.batch_size,
            context.cfg.data.num_workers,
        )

    def autocast(self, device: torch.device) -> torch.autocast:
        """Mixed precision inside the block, with Lightning's names."""
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
        Rates follow :func:`_cosine_schedule`. With ``heads_only`` the module has linear classifiers
        alone, some of which may diverge. Returns the mean loss of the last epoch.

        Raises:
            UserError: loss or weights of an epoch are not finite.
        """
        device, steps, progress = context.device, len(loader), context.report(self.title)
        schedule = _cosine_schedule(optimizer, steps * self.epochs, round(steps * warmup_epochs))
        scaled = self.precision == "16-mixed" and not heads_only
        scaler = torch.amp.GradScaler(torch.device(device).type, enabled=scaled)
        first, mean, checkpoint = 0, float("nan"), self.checkpoint(context)
        state = _loaded(checkpoint)
        if state is not None:
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])
            scaler.load_state_dict(state["scaler"])
            first, mean = state["epochs"], state["loss"]
        for epoch in range(first, self.epochs):
            loader.order.set_epoch(epoch)
            module.train()
            total = torch.zeros((), device=device)
            with seeded(mix(self.seed, epoch)):
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
            held: dict[str, Any] = {"module": module, "optimizer": optimizer, "scaler": scaler}
            state = {name: part.state_dict() for name, part in held.items()}
            state |= {"epochs": epoch + 1, "loss": mean}
            context.out.mkdir(parents=True, exist_ok=True)
            atomic_write(checkpoint, functools.partial(torch.save, state))
        return mean


def _loaded(checkpoint: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception:
        # torch raises many types of error for a damaged file; the training then starts anew.
        return None
    return state


def _cosine_schedule(optimizer: Optimizer, steps: int, warmup: int = 0) -> Any:
    """timm's schedule by step: linear from 0 over ``warmup`` steps, then half a cosine to 0.

    Call ``step_update(n)`` before step n, counted from 0. A group's ``lr_scale`` is a factor.
    """
    return CosineLRScheduler(
        optimizer,
        t_initial=max(steps - warmup, 1),
        warmup_t=warmup,
        warmup_prefix=True,
        t_in_epochs=False,
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch and numpy, which timm's Mixup uses, and restores both afterwards.

    >>> with seeded(0):
    ...     first = torch.rand(3)
    >>> with seeded(0):
    ...     torch.equal(torch.rand(3), first)
    True
    """
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield
