"""The training step of the release's methods: crops through backbone and classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from solo_ext.host.classifier import accuracy_at_k, class_loss


class TrainingStep(pl.LightningModule):
    """Training step of solo-learn 1.0.2's methods: crops through backbone and classifier.

    Mixin of :class:`solo_ext.host.release_1_0_2.base.BaseMethod`, which has the attributes.
    """

    backbone: nn.Module
    classifier: nn.Module
    knn: Any
    knn_eval: bool
    no_channel_last: bool
    num_crops: int
    num_large_crops: int

    def _in_memory_format(self, X: Tensor) -> Tensor:
        return X if self.no_channel_last else X.to(memory_format=torch.channels_last)

    def forward(self, X: Tensor) -> dict[str, Any]:
        """Features ``feats`` (N, D), and the classifier's ``logits`` (N, C) of them, detached."""
        feats = self.backbone(self._in_memory_format(X))
        return {"logits": self.classifier(feats.detach()), "feats": feats}

    def multicrop_forward(self, X: Tensor) -> dict[str, Any]:
        """Features of a small crop."""
        return {"feats": self.backbone(self._in_memory_format(X))}

    def _with_class_metrics(self, out: dict[str, Any], targets: Tensor) -> dict[str, Any]:
        loss = class_loss(out["logits"], targets)
        acc1, acc5 = accuracy_at_k(out["logits"], targets)
        return {**out, "loss": loss, "acc1": acc1, "acc5": acc5}

    def base_training_step(self, X: Tensor, targets: Tensor) -> dict[str, Any]:
        """Forward pass, classification loss and accuracies of one large crop."""
        return self._with_class_metrics(self(X), targets)

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, Any]:
        """Forwards all crops of ``[indices, [crops], targets]`` and trains the classifier.

        Returns:
            Outputs of :meth:`forward` as lists over crops, and the mean ``loss`` of the classifier.
        """
        _, crops, targets = batch
        crops = [crops] if isinstance(crops, Tensor) else crops
        if len(crops) != self.num_crops:
            raise ValueError(
                f"the batch has {len(crops)} crops, the config asks for {self.num_crops}"
            )
        large = [self.base_training_step(x, targets) for x in crops[: self.num_large_crops]]
        outs: dict[str, Any] = {key: [out[key] for out in large] for key in large[0]}
        for x in crops[self.num_large_crops :]:
            for key, value in self.multicrop_forward(x).items():
                outs.setdefault(key, []).append(value)
        for key in ("loss", "acc1", "acc5"):
            outs[key] = sum(outs[key]) / self.num_large_crops
        self.log_dict(
            {
                "train_class_loss": outs["loss"],
                "train_acc1": outs["acc1"],
                "train_acc5": outs["acc5"],
            },
            on_epoch=True,
            sync_dist=True,
        )
        if self.knn_eval:
            labels = targets.repeat(self.num_large_crops)
            feats = torch.cat(outs["feats"][: self.num_large_crops]).detach()
            self.knn(train_features=feats, train_targets=labels)
        return outs


class MomentumTrainingStep(TrainingStep):
    """Mixin of :class:`solo_ext.host.release_1_0_2.base.BaseMomentumMethod`, likewise."""

    momentum_backbone: nn.Module
    momentum_classifier: nn.Module | None

    @torch.no_grad()
    def momentum_forward(self, X: Tensor) -> dict[str, Any]:
        """Features ``feats`` (N, D) of the momentum backbone."""
        return {"feats": self.momentum_backbone(self._in_memory_format(X))}

    def _shared_step_momentum(self, X: Tensor, targets: Tensor) -> dict[str, Any]:
        out = self.momentum_forward(X)
        if self.momentum_classifier is None:
            return out
        logits = self.momentum_classifier(out["feats"])
        return self._with_class_metrics({**out, "logits": logits}, targets)

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> dict[str, Any]:
        """Adds the momentum outputs of the large crops, named ``momentum_*``."""
        outs = super().training_step(batch, batch_idx)
        _, crops, targets = batch
        crops = [crops] if isinstance(crops, Tensor) else crops
        steps = [self._shared_step_momentum(x, targets) for x in crops[: self.num_large_crops]]
        momentum: dict[str, Any] = {f"momentum_{k}": [s[k] for s in steps] for k in steps[0]}
        if self.momentum_classifier is not None:
            for name in ("momentum_loss", "momentum_acc1", "momentum_acc5"):
                momentum[name] = sum(momentum[name]) / self.num_large_crops
            self.log_dict(
                {
                    "train_momentum_class_loss": momentum["momentum_loss"],
                    "train_momentum_acc1": momentum["momentum_acc1"],
                    "train_momentum_acc5": momentum["momentum_acc5"],
                },
                on_epoch=True,
                sync_dist=True,
            )
            outs["loss"] = outs["loss"] + momentum["momentum_loss"]
        return {**outs, **momentum}
