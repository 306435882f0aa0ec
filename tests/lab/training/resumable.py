"""Configs of runs that are resumed: three epochs of six steps, a checkpoint every two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback

MakeConfig = Callable[..., dict[str, Any]]
STEPS = 6
"""Steps per epoch: 48 images in batches of 8."""

PCL: dict[str, dict[str, Any]] = {
    "pcl": {"symmetric": True},
    # Batches of 7 leave samples out of every epoch, which the bank then lacks.
    "pcl-bank": {"e_step": "bank", "e_step_every": 2},
    "pcl-drawn": {"num_prototypes": [20, 30], "num_negatives": 12, "collisions": "paper"},
}
CLUSTERS = {"num_prototypes": [3, 6], "warmup_epochs": 1}
MIXES = {"num_hard": 6, "num_pair_mixes": 4, "num_query_mixes": 3, "warmup_epochs": 1}
CONTRASTIVE: dict[str, dict[str, Any]] = {
    "hard_negative-queue": {"negatives": "queue", "queue_size": 40, "exclude_own": True},
    "hard_negative-prototypes": {
        "positives": "prototype",
        "clusters": {**CLUSTERS, "e_step": "bank"},
        "mixing": MIXES,
    },
    "mochi": {"queue_size": 20, "mixing": MIXES},
    "nnclr_symmetric": {"support_set": {"size": 30, "top_k": 2, "exclude_own": True}},
    # Every epoch's clusters continue those of the one before.
    "metric": {
        "loss": "arcface_loss_func",
        "classes": "cluster",
        "clusters": {"num_prototypes": [5], "warmup_epochs": 0},
    },
}
SMALL = {"augmentations": [{"crop_size": 16, "num_crops": 1}, {"crop_size": 8, "num_crops": 2}]}
DISTILLED: dict[str, dict[str, Any]] = {
    # Small crops fill a queue of their own.
    "seed": {**SMALL, "method_kwargs": {"queue_size": 20}},
    "seed-mixed": {
        "method_kwargs": {
            "loss": "contrastive",
            "teacher_temperature": None,
            "queue_size": 20,
            "mixing": MIXES,
        }
    },
    "protoseed": SMALL,
    "protoseed-old": {
        "method_kwargs": {"prototypes": "old", "num_prototypes": 8, "assignment": "softmax"}
    },
    "protocpc": {"method_kwargs": {"freeze_prototypes_epochs": 1}},
}
METHODS = ("debiased", *CONTRASTIVE, *PCL, *DISTILLED)
"""Every method of the plugin, and its variants that hold other state."""


def config_of(make_config: MakeConfig, method: str, **changes: Any) -> dict[str, Any]:
    """Of a method, or of ``method-variant``; changes of sections are added to them."""
    kwargs: dict[str, Any] = {"queue_size": 16} if method in ("mocov2plus", "nnclr", "swav") else {}
    if method == "wmse":
        kwargs = {"whitening_size": 8, "whitening_eps": 0.5}
    if method in PCL:
        kwargs = {"num_prototypes": [3, 6], "queue_size": 20, "warmup_epochs": 1, **PCL[method]}
    kwargs = CONTRASTIVE.get(method, kwargs)
    settings: dict[str, Any] = {
        "method_kwargs": kwargs,
        "optimizer": {"batch_size": 8, "lr": 0.05},
        "scheduler": {"name": "warmup_cosine", "warmup_epochs": 1},
        "checkpoint": {"every_n_steps": 2},
        "max_epochs": 3,
    }
    if method == "dino":
        settings["method_kwargs"] = {"warmup_teacher_temperature_epochs": 2}
    settings |= DISTILLED.get(method, {})
    if method == "pcl-bank":
        settings["optimizer"]["batch_size"] = 7
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return make_config(method.partition("-")[0], **settings)


class KillAt(Callback):
    """Raises before the batch that follows so many."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx >= self.step:
            raise RuntimeError(f"killed at {self.step}")


class ReadsTheLoss(Callback):
    """Lets the host read the loss in every step of a contrastive method."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        contrast = module.contrast

        def read(*args: Any) -> Any:
            loss, metrics = contrast(*args)
            return loss * (1.0 if loss.item() > 0 else 2.0), metrics

        module.contrast = read
