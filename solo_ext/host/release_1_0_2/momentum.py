"""Methods with a momentum backbone, for solo-learn 1.0.2 behind main's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.host.release_1_0_2.base import BaseMethod, fill

DEFAULTS = {"momentum": {"base_tau": 0.99, "final_tau": 1.0, "classifier": False}}


class BaseMomentumMethod(BaseMethod):
    """Adds a momentum backbone, its exponential moving average and an optional classifier.

    Args:
        cfg: solo-learn main's config, with the section ``momentum``.
    """

    def __init__(self, cfg: DictConfig, **_: Any) -> None:
        # Imported here: this module takes part in the import of solo itself.
        from solo.utils.momentum import MomentumUpdater, initialize_momentum_params

        super().__init__(cfg)
        self.momentum_backbone, _dim = self._new_backbone()
        initialize_momentum_params(self.backbone, self.momentum_backbone)
        momentum = self.cfg.momentum
        self.momentum_classifier = (
            nn.Linear(self.features_dim, self.num_classes) if momentum.classifier else None
        )
        self.momentum_updater = MomentumUpdater(momentum.base_tau, momentum.final_tau)

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults of ``momentum``."""
        return fill(BaseMethod.add_and_assert_specific_cfg(cfg), DEFAULTS)

    @property
    def momentum_encoder(self) -> nn.Module:
        """The release's name of the momentum backbone."""
        return self.momentum_backbone

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the momentum classifier, where there is one."""
        if self.momentum_classifier is None:
            return super().learnable_params
        return [
            *super().learnable_params,
            {
                "name": "momentum_classifier",
                "params": self.momentum_classifier.parameters(),
                "lr": self.classifier_lr,
                "weight_decay": 0,
            },
        ]

    @property
    def momentum_pairs(self) -> list[tuple[Any, Any]]:
        """Pairs (online, momentum) that are averaged after each optimiser step."""
        return [(self.backbone, self.momentum_backbone)]

    def on_train_start(self) -> None:
        """Starts counting optimiser steps."""
        self.last_step = 0

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

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Moves the momentum networks, if the optimiser stepped."""
        if self.trainer.global_step > self.last_step:
            for online, momentum in self.momentum_pairs:
                self.momentum_updater.update(online, momentum)
            self.log("tau", self.momentum_updater.cur_tau)
            self.momentum_updater.update_tau(
                cur_step=self.trainer.global_step,
                max_steps=self.trainer.estimated_stepping_batches,
            )
        self.last_step = self.trainer.global_step

    def validation_step(
        self,
        batch: Sequence[Tensor],
        batch_idx: int,
        dataloader_idx: int | None = None,
        update_validation_step_outputs: bool = True,
    ) -> dict[str, Any]:
        """Adds the momentum classifier's metrics, where there is one."""
        metrics = super().validation_step(batch, batch_idx, update_validation_step_outputs=False)
        if self.momentum_classifier is not None:
            out = self._shared_step_momentum(*batch)
            for name in ("loss", "acc1", "acc5"):
                metrics[f"momentum_val_{name}"] = out[name]
        if update_validation_step_outputs:
            self.validation_step_outputs.append(metrics)
        return metrics

    def on_validation_epoch_end(self) -> None:
        """Adds means of the momentum classifier's metrics."""
        if self.momentum_classifier is not None:
            names = ("momentum_val_loss", "momentum_val_acc1", "momentum_val_acc5")
            self.log_dict(self._validation_means(*names), sync_dist=True)
        super().on_validation_epoch_end()
