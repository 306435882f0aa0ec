"""Linear classifiers with different rates on one pass of a frozen backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.data.loaders import ResumableLoader
from solo_ext.lab.evaluation.features import pooled
from solo_ext.lab.evaluation.supervised.schedule import Precision, autocast, cosine_schedule
from solo_ext.lab.evaluation.supervised.unfinished import EvalCheckpoint
from solo_ext.memory.state import eval_mode

_MOMENTUM = 0.9


class Heads(nn.Module):
    """For every rate a classifier that sees all images and, where a rate is to be chosen, another
    that does not see those held out.

    All start at zero: cross-entropy is convex in them.

    Args:
        features_dim: D.
        num_classes: C.
        rates: of SGD, one for each classifier.
        choosing: whether there are the others.
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
        total = sum(
            (F.cross_entropy(h(features), targets) for h in self.final), features.new_zeros(())
        )
        rows = seen.sum().clamp_min(1)
        for head in self.choosing:
            total = (
                total
                + (F.cross_entropy(head(features), targets, reduction="none") * seen).sum() / rows
            )
        return total


@dataclass(frozen=True)
class LinearHeadSweep:
    """How the classifiers are trained: SGD, momentum 0.9, a cosine schedule to 0.

    Attributes:
        epochs: passes over the images.
        weight_decay: of weights and biases.
        precision: of the backbone's forward pass.
        device: where to train.
    """

    epochs: int
    weight_decay: float
    precision: Precision
    device: str

    def train(
        self,
        backbone: nn.Module,
        heads: Heads,
        loader: ResumableLoader,
        held: Tensor,
        unfinished: EvalCheckpoint,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Trains; goes on behind the last finished epoch of an earlier, stopped call.

        Args:
            backbone: stays as it is, in eval mode; on ``device``.
            heads: on ``device``.
            loader: batches ``(indices, [views], targets)``.
            held: (n,) bool by index, the images that choose the rate.
            unfinished: where every finished epoch is kept.
            progress: called with the steps done and in all.
        """
        steps = len(loader)
        total = steps * self.epochs
        optimizer = torch.optim.SGD(
            heads.param_groups(), momentum=_MOMENTUM, weight_decay=self.weight_decay
        )
        schedule = cosine_schedule(optimizer, total)
        state = unfinished.load()
        if state is not None:
            heads.load_state_dict(state["heads"])
            optimizer.load_state_dict(state["optimizer"])
        for epoch in range(state["epochs"] if state else 0, self.epochs):
            loader.order.set_epoch(epoch)
            for step, (indices, (views,), targets) in enumerate(loader, start=epoch * steps):
                schedule.step_update(step)
                features = self._features(backbone, views)
                optimizer.zero_grad()
                seen = (~held[indices]).to(features)
                loss = heads.loss(features, targets.to(self.device), seen)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if progress is not None:
                    progress(step + 1, total)
            done = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}
            unfinished.save({"epochs": epoch + 1, **done})

    @torch.no_grad()
    def _features(self, backbone: nn.Module, views: Tensor) -> Tensor:
        with eval_mode(backbone), autocast(self.device, self.precision):
            return pooled(backbone(views.to(self.device)), len(views))
