"""Crops of a batch, from decoded images in memory."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.measure import Work
from benchmarks.operation import Case, Goal, Setup, peer
from benchmarks.record import Effort
from benchmarks.trainers import made_images
from solo_ext.config.schema import Augmentation
from solo_ext.core.files import config_root
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.transforms import pretrain_transform

BATCH = 256


def setup(effort: Effort, side: int, name: str, size: int) -> Setup:
    """All sources on the same images."""
    augmentations = config_root() / "solo_ext" / "augmentations" / f"{name}.yaml"
    entries = yaml.safe_load(augmentations.read_text())
    pipelines = [Augmentation(**e).model_copy(update={"crop_size": size}) for e in entries]
    images = made_images(effort.size(BATCH), side)
    pixels = torch.from_numpy(np.stack([np.asarray(i) for i in images]))
    pixels = pixels.permute(0, 3, 1, 2).contiguous()
    transform = pretrain_transform("custom", pipelines)
    augment, epochs = BatchAugment("custom", pipelines, side, side, 5), itertools.count()

    def ours() -> Any:
        return augment(pixels, augment.draw(next(epochs), np.arange(len(pixels))))

    def torchvision() -> list[torch.Tensor]:
        views = [transform(image) for image in images]
        return [torch.stack(crops) for crops in zip(*views, strict=True)]

    def kornia(K: Any) -> Work:
        made = []
        for p in pipelines:
            # The settings, without those of what is never taken: it would still cost its draws.
            scale, jitter = (p.rrc.crop_min_scale, p.rrc.crop_max_scale), p.color_jitter
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            blur = (size // 20 * 2 + 1,) * 2, (0.1, 2.0)
            steps = [
                K.RandomResizedCrop((size, size), scale=scale, resample="bicubic"),
                K.ColorJitter(*jitter.strengths, p=jitter.prob),
                K.RandomGrayscale(p=p.grayscale.prob),
                K.RandomGaussianBlur(*blur, p=p.gaussian_blur.prob),
                K.RandomSolarize(p=p.solarization.prob),
                K.RandomHorizontalFlip(p=p.horizontal_flip.prob),
                K.Normalize(mean, std),
            ]
            taken = [step for step in steps if step.p > 0]
            made += [K.AugmentationSequential(*taken, data_keys=["input"])] * p.num_crops
        return torch.no_grad()(lambda: [augment(pixels.float() / 255) for augment in made])

    variants = {"ours": ours, "torchvision": torchvision}
    return Setup({**variants, "kornia": peer("kornia.augmentation", kornia)})


def case(side: int, name: str, size: int, torchvision: float = 0, kornia: float = 0) -> Case:
    """The crops of one config, and how many times faster they are to be."""
    made = partial(setup, side=side, name=name, size=size)
    goals = Goal("torchvision", torchvision), Goal("kornia", kornia)
    return Case(f"augmentation {name}, {side} px to {size}", made, goals)


CASES = (
    case(32, "cifar", 32, torchvision=5, kornia=3),
    case(96, "small32", 32),
    case(128, "mocov2_128", 128),
)
