"""Augmented training views with labels."""

from __future__ import annotations

from typing import Any

from torchvision import transforms as T

from solo_ext.config.schema import Chance, View
from solo_ext.core.errors import ConfigError
from solo_ext.data.loaders import ResumableLoader
from solo_ext.data.sampler import EpochSampler
from solo_ext.data.transforms import MultiCrop, pretrain_transform
from solo_ext.data.views import TrainingViews
from solo_ext.lab.evaluation.subject import EvalContext

STANDARD_VIEW = View(horizontal_flip=Chance(prob=0.5))
"""Crops of 8 to 100 % of the area, and flips: the usual view of supervised training."""


def training_loader(
    subject: EvalContext, view: View, *, batch_size: int, seed: int, random_erasing: float = 0.0
) -> ResumableLoader:
    """Batches ``(indices, [views], targets)``; the last, incomplete one of an epoch is dropped.

    Order and views depend on (seed, epoch, index) alone, not on the number of workers.

    Args:
        subject: images, size and normalisation.
        view: how images are augmented.
        batch_size: images of a batch.
        seed: of order and views.
        random_erasing: probability that a box of the view is blanked (Zhong et al., 2017, arXiv
            1708.04896).

    Raises:
        ConfigError: fewer images than ``batch_size``.
    """
    if batch_size > len(subject.train):
        raise ConfigError(
            "batch_size",
            batch_size,
            f"the training set has {len(subject.train)} images",
            "take a smaller batch",
        )
    fixed = subject.cfg["augmentations"][0]
    own: dict[str, Any] = {k: fixed.get(k) for k in ("crop_size", "mean", "std")}
    augmentation = {**view.model_dump(), **own, "num_crops": 1}
    transform = pretrain_transform(subject.cfg["data"]["dataset"], [augmentation])
    if random_erasing:
        erasing = T.RandomErasing(p=random_erasing)
        transform = MultiCrop([T.Compose([transform.transforms[0], erasing])], [1])
    return ResumableLoader(
        TrainingViews(subject.train, transform, seed),
        # This process alone trains, whoever helped to extract features.
        EpochSampler(len(subject.train), seed, num_replicas=1, rank=0),
        batch_size,
        subject.cfg["data"]["num_workers"],
    )
