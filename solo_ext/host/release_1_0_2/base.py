"""Base classes of methods for solo-learn 1.0.2, with the interface of its main branch.

They replace the release's own ``solo.methods.base``, whose constructor, hooks and imports are for
pytorch-lightning 1.4. The release's built-in methods inherit from them. Their optimisers and
schedules are those of timm and torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig, OmegaConf
from timm.optim.lars import Lars
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from solo_ext.host.backbones import BackboneTable, build_backbone
from solo_ext.host.classifier import accuracy_at_k, class_loss

Group = dict[str, Any]
DEFAULTS: dict[str, Any] = {
    "backbone": {"kwargs": {}},
    "optimizer": {"exclude_bias_n_norm_wd": False, "kwargs": {}},
    "accumulate_grad_batches": 1,
    "scheduler": {
        "lr_decay_steps": None,
        "min_lr": 0.0,
        "warmup_start_lr": 3e-5,
        "warmup_epochs": 10,
        "interval": "step",
    },
    "knn_eval": {"enabled": False, "k": 20, "distance_func": "euclidean"},
    "performance": {"disable_channel_last": False},
    "method_kwargs": {},
}
MOMENTUM_DEFAULTS = {"momentum": {"base_tau": 0.99, "final_tau": 1.0, "classifier": False}}


def fill(cfg: DictConfig, defaults: dict[str, Any]) -> DictConfig:
    """Adds the defaults that ``cfg`` lacks, in place, at any depth.

    >>> fill(OmegaConf.create({"momentum": {"base_tau": 0.9}}), MOMENTUM_DEFAULTS)
    {'momentum': {'base_tau': 0.9, 'final_tau': 1.0, 'classifier': False}}
    """
    OmegaConf.set_struct(cfg, False)
    for key, value in defaults.items():
        if isinstance(value, dict) and OmegaConf.select(cfg, key) is not None:
            fill(cfg[key], value)
        elif OmegaConf.select(cfg, key) is None and (value is not None or key not in cfg):
            cfg[key] = value
    return cfg


class BaseMethod(pl.LightningModule):
    """Backbone, online classifier, optimiser and the shared part of the steps.

    >>> from solo_ext.methods.registry import example_config
    >>> out = BaseMethod(example_config("mine"))(torch.randn(4, 3, 32, 32))
    >>> out["feats"].shape, out["logits"].shape
    (torch.Size([4, 8]), torch.Size([4, 3]))
    """

    _BACKBONES = BackboneTable()
    _OPTIMIZERS: dict[str, Any] = {"sgd": SGD, "lars": Lars, "adam": Adam, "adamw": AdamW}

    def __init__(self, cfg: DictConfig, **_: Any) -> None:
        super().__init__()
        cfg = self.add_and_assert_specific_cfg(cfg)
        self.cfg = cfg
        self.backbone_args = dict(cfg.backbone.kwargs)
        self.backbone_name: str = cfg.backbone.name
        self.backbone, self.features_dim = self._new_backbone()
        self.num_classes: int = cfg.data.num_classes
        self.classifier = nn.Linear(self.features_dim, self.num_classes)

        self.max_epochs: int = cfg.max_epochs
        self.accumulate_grad_batches: int = cfg.accumulate_grad_batches
        self.optimizer: str = cfg.optimizer.name
        self.batch_size: int = cfg.optimizer.batch_size
        self.weight_decay: float = cfg.optimizer.weight_decay
        self.extra_optimizer_args = dict(cfg.optimizer.kwargs)
        self.exclude_bias_n_norm_wd: bool = cfg.optimizer.exclude_bias_n_norm_wd
        self.scheduler: str = cfg.scheduler.name
        self.lr_decay_steps = cfg.scheduler.lr_decay_steps
        self.warmup_epochs: float = cfg.scheduler.warmup_epochs
        self.scheduler_interval: str = cfg.scheduler.interval
        # As in main, learning rates scale with the effective batch.
        scale = self.accumulate_grad_batches or 1
        self.lr: float = cfg.optimizer.lr * scale
        self.classifier_lr: float = cfg.optimizer.classifier_lr * scale
        self.min_lr: float = cfg.scheduler.min_lr * scale
        self.warmup_start_lr: float = cfg.scheduler.warmup_start_lr * scale

        self.num_large_crops: int = cfg.data.num_large_crops
        self.num_small_crops: int = cfg.data.num_small_crops
        self.num_crops = self.num_large_crops + self.num_small_crops
        self.multicrop = self.num_small_crops != 0
        self.knn_eval: bool = cfg.knn_eval.enabled
        self.knn_k: int = cfg.knn_eval.k
        if self.knn_eval:
            from solo_ext.memory.knn import OnlineKNN

            self.knn = OnlineKNN(k=self.knn_k, distance_fx=cfg.knn_eval.distance_func)
        self.no_channel_last: bool = cfg.performance.disable_channel_last
        self.validation_step_outputs: list[dict[str, Any]] = []

    def _new_backbone(self) -> tuple[nn.Module, int]:
        return build_backbone(
            self._BACKBONES,
            self.backbone_name,
            self.backbone_args,
            method=self.cfg.method,
            dataset=self.cfg.data.dataset,
        )

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in main's defaults; methods override this to add their own."""
        return fill(cfg, DEFAULTS)

    @property
    def encoder(self) -> nn.Module:
        """The release's name for the backbone."""
        return self.backbone

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Parameter groups of the backbone and the online classifier."""
        return [
            {"name": "backbone", "params": self.backbone.parameters()},
            {
                "name": "classifier",
                "params": self.classifier.parameters(),
                "lr": self.classifier_lr,
                "weight_decay": 0,
            },
        ]

    def configure_optimizers(self) -> Any:
        """Makes the optimiser and schedule of the config, as main does.

        Three things differ: groups with ``static_lr`` keep their rate by a schedule of plain
        numbers, so that checkpoints can be loaded; LARS is timm's, which runs Lightning's closure
        before it scales gradients; the warm-up is computed in closed form.
        """
        groups = [dict(group, params=list(group["params"])) for group in self.learnable_params]
        if self.exclude_bias_n_norm_wd:
            groups = split_by_dimension(groups, weight_decay=0.0)
        kwargs = dict(self.extra_optimizer_args)
        if self.optimizer == "lars":
            groups, kwargs = _lars_arguments(groups, kwargs)
        static = [bool(group.pop("static_lr", False)) for group in groups]
        make = BaseMethod._OPTIMIZERS[self.optimizer]
        optimizer = make(groups, lr=self.lr, weight_decay=self.weight_decay, **kwargs)
        # As upstream, give static groups the base rate and not their own.
        for group, fixed in zip(optimizer.param_groups, static, strict=True):
            if fixed:
                group["lr"] = self.lr
        if self.scheduler == "none":
            return optimizer
        return [optimizer], [_schedule(self, optimizer, static)]

    def _in_memory_format(self, X: Tensor) -> Tensor:
        return X if self.no_channel_last else X.to(memory_format=torch.channels_last)

    def forward(self, X: Tensor) -> dict[str, Any]:
        """Features ``feats`` (N, D), and classifier ``logits`` (N, C) from detached ``feats``."""
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
        names = {"loss": "train_class_loss", "acc1": "train_acc1", "acc5": "train_acc5"}
        outs |= {key: sum(outs[key]) / self.num_large_crops for key in names}
        metrics = {name: outs[key] for key, name in names.items()}
        self.log_dict(metrics, on_epoch=True, sync_dist=True)
        if self.knn_eval:
            labels = targets.repeat(self.num_large_crops)
            feats = torch.cat(outs["feats"][: self.num_large_crops]).detach()
            self.knn(train_features=feats, train_targets=labels)
        return outs

    def base_validation_step(self, X: Tensor, targets: Tensor) -> dict[str, Any]:
        """Like :meth:`base_training_step`, for validation."""
        return self._with_class_metrics(self(X), targets)

    def validation_step(
        self,
        batch: Sequence[Tensor],
        batch_idx: int,
        dataloader_idx: int | None = None,
        update_validation_step_outputs: bool = True,
    ) -> dict[str, Any]:
        """Classifies one validation batch ``[X, targets]``."""
        X, targets = batch
        out = self.base_validation_step(X, targets)
        if self.knn_eval and not self.trainer.sanity_checking:
            self.knn(test_features=out["feats"].detach(), test_targets=targets)
        metrics = {
            "batch_size": targets.size(0),
            "val_loss": out["loss"],
            "val_acc1": out["acc1"],
            "val_acc5": out["acc5"],
        }
        if update_validation_step_outputs:
            self.validation_step_outputs.append(metrics)
        return metrics

    def on_validation_epoch_end(self) -> None:
        """Logs means over all validation images, whatever the size of the last batch."""
        self.log_dict(self._validation_means("val_loss", "val_acc1", "val_acc5"), sync_dist=True)
        if self.knn_eval and not self.trainer.sanity_checking:
            acc1, acc5 = self.knn.compute()
            self.log_dict({"val_knn_acc1": acc1, "val_knn_acc5": acc5}, sync_dist=True)
        self.validation_step_outputs.clear()

    def _validation_means(self, *names: str) -> dict[str, Tensor]:
        outputs = self.validation_step_outputs
        total = sum(out["batch_size"] for out in outputs)
        return {
            name: sum((out["batch_size"] * out[name] for out in outputs), torch.zeros(()))
            .squeeze()
            .div(total)
            for name in names
        }


class BaseMomentumMethod(BaseMethod):
    """Adds a momentum backbone, its exponential moving average and an optional classifier.

    >>> from solo_ext.methods.registry import example_config
    >>> cfg = BaseMomentumMethod.add_and_assert_specific_cfg(example_config("mine"))
    >>> BaseMomentumMethod(cfg).momentum_forward(torch.randn(4, 3, 32, 32))["feats"].shape
    torch.Size([4, 8])
    """

    def __init__(self, cfg: DictConfig, **_: Any) -> None:
        # Import these here, because this module is imported while solo is being imported.
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
        return fill(BaseMethod.add_and_assert_specific_cfg(cfg), MOMENTUM_DEFAULTS)

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the momentum classifier, if there is one."""
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
            keys = ("momentum_loss", "momentum_acc1", "momentum_acc5")
            momentum |= {key: sum(momentum[key]) / self.num_large_crops for key in keys}
            metrics = {"train_momentum_class_loss": momentum["momentum_loss"]}
            metrics |= {f"train_{key}": momentum[key] for key in keys[1:]}
            self.log_dict(metrics, on_epoch=True, sync_dist=True)
            outs["loss"] = outs["loss"] + momentum["momentum_loss"]
        return {**outs, **momentum}

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Updates the momentum networks, if the optimiser made a step."""
        if self.trainer.global_step > self.last_step:
            for online, momentum in self.momentum_pairs:
                self.momentum_updater.update(online, momentum)
            self.log("tau", self.momentum_updater.cur_tau)
            self.momentum_updater.update_tau(
                cur_step=self.trainer.global_step, max_steps=self.trainer.estimated_stepping_batches
            )
        self.last_step = self.trainer.global_step

    def validation_step(
        self,
        batch: Sequence[Tensor],
        batch_idx: int,
        dataloader_idx: int | None = None,
        update_validation_step_outputs: bool = True,
    ) -> dict[str, Any]:
        """Adds the momentum classifier's metrics, if there is one."""
        metrics = super().validation_step(batch, batch_idx, update_validation_step_outputs=False)
        if self.momentum_classifier is not None:
            out = self._shared_step_momentum(*batch)
            for name in ("loss", "acc1", "acc5"):
                metrics[f"momentum_val_{name}"] = out[name]
        if update_validation_step_outputs:
            self.validation_step_outputs.append(metrics)
        return metrics

    def on_validation_epoch_end(self) -> None:
        """Adds the means of the momentum classifier's metrics."""
        if self.momentum_classifier is not None:
            names = ("momentum_val_loss", "momentum_val_acc1", "momentum_val_acc5")
            self.log_dict(self._validation_means(*names), sync_dist=True)
        super().on_validation_epoch_end()


def split_by_dimension(groups: Iterable[Group], **vectors: Any) -> list[Group]:
    """Splits groups into matrices and vectors (biases, norms); ``vectors`` updates the latter.

    >>> layer = torch.nn.Linear(4, 3)
    >>> groups = split_by_dimension([{"params": list(layer.parameters())}], weight_decay=0.0)
    >>> [([tuple(p.shape) for p in g["params"]], g.get("weight_decay")) for g in groups]
    [([(3, 4)], None), ([(3,)], 0.0)]
    """
    out: list[Group] = []
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim > 1]
        rest = [p for p in group["params"] if p.ndim <= 1]
        if matrices:
            out.append({**group, "params": matrices})
        if rest:
            name = {"name": f"{group['name']}_no_decay"} if "name" in group else {}
            out.append({**group, **name, **vectors, "params": rest})
    return out


def _lars_arguments(groups: list[Group], kwargs: dict[str, Any]) -> tuple[list[Group], Group]:
    """Translates LARS arguments to timm's; excluded vectors get neither decay nor adaptation."""
    kwargs = {"momentum": 0.9, **kwargs}
    kwargs["trust_coeff"] = kwargs.pop("eta", 1e-3)
    kwargs["trust_clip"] = kwargs.pop("clip_lr", False)
    if kwargs.pop("exclude_bias_n_norm", False):
        groups = split_by_dimension(groups, weight_decay=0.0, always_adapt=False)
    return [{"always_adapt": True, **group} for group in groups], kwargs


def _schedule(module: Any, optimizer: Optimizer, static: list[bool]) -> Any:
    per_step = module.scheduler_interval == "step"
    if module.scheduler == "warmup_cosine":
        total = module.trainer.estimated_stepping_batches if per_step else module.max_epochs
        warmup = module.warmup_epochs * total / module.max_epochs
        rate: Any = partial(
            warmup_cosine,
            warmup=warmup,
            total=total,
            start=module.warmup_start_lr,
            end=module.min_lr,
        )
        # As upstream, static groups keep their rate from step two; step one has the warm-up rate.
        first = module.warmup_start_lr if module.warmup_epochs > 0 else module.lr
        factors = [
            _static(first / module.lr) if fixed else _factor(rate, group["lr"])
            for group, fixed in zip(optimizer.param_groups, static, strict=True)
        ]
        scheduler = LambdaLR(optimizer, factors)
        return {"scheduler": scheduler, "interval": module.scheduler_interval, "frequency": 1}
    if not any(static):
        return MultiStepLR(optimizer, list(module.lr_decay_steps))
    decayed = partial(_decayed, list(module.lr_decay_steps))
    return LambdaLR(optimizer, [_static(1.0) if fixed else decayed for fixed in static])


def warmup_cosine(
    step: int, base: float, *, warmup: float, total: float, start: float, end: float
) -> float:
    """Learning rate after ``step`` of ``total`` steps (or epochs).

    It rises linearly from ``start`` to ``base`` in ``warmup`` steps, then falls along half a cosine
    to ``end``.

    >>> rate = partial(warmup_cosine, base=1.0, warmup=2, total=6, start=0.1, end=0.0)
    >>> [round(rate(step), 3) for step in range(6)]
    [0.1, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        # Bound the fraction: a fractional warm-up would otherwise end above the base rate.
        return start + (base - start) * min(step / max(warmup - 1, 1), 1.0)
    progress = (step - warmup) / max(total - warmup, 1)
    return end + 0.5 * (base - end) * (1 + math.cos(math.pi * progress))


def _factor(rate: Any, base: float) -> Callable[[int], float]:
    return lambda step: rate(step, base) / base


def _static(first: float) -> Callable[[int], float]:
    return lambda step: 1.0 if step else first


def _decayed(milestones: list[int], step: int) -> float:
    return float(0.1 ** sum(step >= m for m in milestones))
