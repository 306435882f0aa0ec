"""Training a whole network with labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup  # type: ignore[attr-defined]
from torch import Tensor
from torch.optim import Optimizer

from solo_ext.core.draws import mix
from solo_ext.core.errors import UserError
from solo_ext.data.loaders import ResumableLoader
from solo_ext.lab.evaluation.supervised.classifier import Classifier
from solo_ext.lab.evaluation.supervised.schedule import Precision, autocast, cosine_schedule, seeded
from solo_ext.lab.evaluation.supervised.unfinished import EvalCheckpoint


@dataclass(frozen=True)
class FineTuning:
    """How a network is trained.

    Attributes:
        epochs: passes over the images.
        warmup_epochs: of these, with a rate that grows from 0.
        mixup: timm's, ``None`` for none.
        label_smoothing: where nothing is mixed; timm's mixup smooths by itself.
        precision: of the forward pass.
        seed: of everything that is drawn.
        device: where to train.
    """

    epochs: int
    warmup_epochs: float
    mixup: Mixup | None
    label_smoothing: float
    precision: Precision
    seed: int
    device: str

    def train(
        self,
        model: Classifier,
        loader: ResumableLoader,
        optimizer: Optimizer,
        unfinished: EvalCheckpoint,
        progress: Callable[[int, int], None] | None = None,
    ) -> float:
        """Trains; goes on behind the last finished epoch of an earlier, stopped call.

        Chance is drawn from (seed, epoch), so that a training in parts ends where one in a piece
        does.

        Args:
            model: on ``device``.
            loader: batches ``(indices, [views], targets)``.
            optimizer: of the model's parameters.
            unfinished: where every finished epoch is kept.
            progress: called with the steps done and in all.

        Returns:
            Mean loss of the last epoch.

        Raises:
            UserError: the loss or the weights are not finite.
        """
        steps = len(loader)
        total = steps * self.epochs
        schedule = cosine_schedule(optimizer, total, round(steps * self.warmup_epochs))
        scaler = torch.amp.GradScaler(
            torch.device(self.device).type, enabled=self.precision == "16-mixed"
        )
        first, loss = _resumed(unfinished, model, optimizer, scaler)
        for epoch in range(first, self.epochs):
            loader.order.set_epoch(epoch)
            model.train()
            summed = torch.zeros((), device=self.device)
            with seeded(mix(self.seed, epoch), self.device):
                for step, (_, (views,), targets) in enumerate(loader, start=epoch * steps):
                    schedule.step_update(step)
                    optimizer.zero_grad()
                    value = self._loss(model, views.to(self.device), targets.to(self.device))
                    scaler.scale(value).backward()  # type: ignore[no-untyped-call]
                    scaler.step(optimizer)
                    scaler.update()
                    summed += value.detach()
                    if progress is not None:
                        progress(step + 1, total)
            loss = float(summed) / steps
            if not torch.tensor(loss).isfinite():
                raise diverged(f"loss of epoch {epoch + 1} is")
            # The loss is that before the last update.
            if not all(bool(p.isfinite().all()) for p in model.state_dict().values()):
                raise diverged(f"weights after epoch {epoch + 1} are")
            state = {"epochs": epoch + 1, "loss": loss, "model": model.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            unfinished.save(state)
        return loss

    def _loss(self, model: Classifier, views: Tensor, targets: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        if self.mixup is not None:
            views, targets = self.mixup(views, targets)
            smoothing = 0.0
        with autocast(self.device, self.precision):
            logits = model(views)
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


def diverged(what: str) -> UserError:
    """The error of a training that ended in no numbers."""
    return UserError(f"the {what} not finite; take a smaller lr, or longer warmup_epochs")


def _resumed(
    unfinished: EvalCheckpoint, model: Classifier, optimizer: Optimizer, scaler: Any
) -> tuple[int, float]:
    """Epochs done and the loss of the last of them."""
    state = unfinished.load()
    if state is None:
        return 0, float("nan")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    return state["epochs"], state["loss"]


@torch.no_grad()
def predicted(
    model: Classifier, loader: Any, device: str, precision: Precision = "32-true"
) -> tuple[Tensor, Tensor]:
    """Logits (n, C), fp32, and targets (n,) of a loader of ``(images, targets)``, in eval mode."""
    model.eval()
    parts: list[tuple[Tensor, Tensor]] = []
    for images, targets in loader:
        with autocast(device, precision):
            logits = model(images.to(device))
        parts.append((logits.float().cpu(), targets))
    logits, targets = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(targets)
