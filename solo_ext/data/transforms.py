"""solo-learn's augmentation schema as torchvision transforms that use torch's generator only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision import transforms as T

from solo_ext.config.schema import Augmentation
from solo_ext.data.fixed import Transform, statistics

BLUR_RADIUS = (0.1, 2.0)
"""Smallest and largest radius in pixels."""


class GaussianBlur:
    """Blurs with a radius drawn uniformly from :data:`BLUR_RADIUS`.

    >>> GaussianBlur()(Image.new("RGB", (12, 12))).size
    (12, 12)
    """

    def __call__(self, image: Image.Image) -> Image.Image:
        radius = torch.empty(()).uniform_(*BLUR_RADIUS).item()
        return image.filter(ImageFilter.GaussianBlur(radius))


class MultiCrop:
    """All crops of one image: as many by each of ``transforms`` as ``counts`` says.

    >>> crops = MultiCrop([T.RandomCrop(8), T.RandomCrop(4)], [2, 1])
    >>> [crop.size for crop in crops(Image.new("RGB", (12, 12)))]
    [(8, 8), (8, 8), (4, 4)]
    """

    def __init__(self, transforms: Sequence[Transform], counts: Sequence[int]) -> None:
        self.transforms, self.counts = list(transforms), list(counts)

    def __repr__(self) -> str:
        pairs = zip(self.counts, self.transforms, strict=True)
        return "\n".join(f"{count} x {transform}" for count, transform in pairs)

    def __call__(self, image: Image.Image) -> list[Tensor]:
        return [
            transform(image)
            for transform, count in zip(self.transforms, self.counts, strict=True)
            for _ in range(count)
        ]


def pretrain_transform(dataset: str, augmentations: Sequence[Augmentation]) -> MultiCrop:
    """The transform of a config, from ``data.dataset`` and ``augmentations``.

    >>> pipeline = Augmentation(crop_size=8, num_crops=2)
    >>> crops = pretrain_transform("custom", [pipeline])(Image.new("RGB", (12, 12)))
    >>> [tuple(crop.shape) for crop in crops]
    [(3, 8, 8), (3, 8, 8)]
    """
    pipelines = [_pipeline(a, *statistics(dataset, a)) for a in augmentations]
    return MultiCrop(pipelines, [a.num_crops for a in augmentations])


def _pipeline(a: Augmentation, mean: Sequence[float], std: Sequence[float]) -> Transform:
    size, bicubic = a.crop_size, T.InterpolationMode.BICUBIC
    if a.rrc.enabled:
        scale = (a.rrc.crop_min_scale, a.rrc.crop_max_scale)
        steps: list[Any] = [T.RandomResizedCrop(size, scale=scale, interpolation=bicubic)]
    else:
        steps = [T.Resize(size, interpolation=bicubic), T.CenterCrop(size)]
    if a.rand_augment:
        steps.append(T.RandAugment(a.rand_augment.num_ops, a.rand_augment.magnitude))
    if a.auto_augment:
        steps.append(T.AutoAugment(T.AutoAugmentPolicy(a.auto_augment.policy)))
    if a.color_jitter.prob:
        jitter = T.ColorJitter(*a.color_jitter.strengths)
        steps.append(T.RandomApply([jitter], p=a.color_jitter.prob))
    if a.grayscale.prob:
        steps.append(T.RandomGrayscale(p=a.grayscale.prob))
    for chance, transform in (
        (a.gaussian_blur, GaussianBlur()),
        (a.solarization, ImageOps.solarize),
        (a.equalization, ImageOps.equalize),
    ):
        if chance.prob:
            steps.append(T.RandomApply([transform], p=chance.prob))
    if a.horizontal_flip.prob:
        steps.append(T.RandomHorizontalFlip(p=a.horizontal_flip.prob))
    steps += [T.ToTensor(), T.Normalize(mean, std)]
    if erasing := a.random_erasing:
        scale, ratio = (erasing.min_scale, erasing.max_scale), erasing.max_ratio
        steps.append(T.RandomErasing(erasing.prob, scale, (1 / ratio, ratio)))
    return T.Compose(steps)  # type: ignore[no-any-return]
