"""The fixed view of an image, and its augmented crops, which draw from torch's generator only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image, ImageFilter, ImageOps
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision import transforms as T

from solo_ext.config.schema import Augmentation, CommonConfig, Crop

BLUR_RADIUS = (0.1, 2.0)
"""Smallest and largest radius of the random blur, in pixels."""
Transform = Callable[[Image.Image], Tensor]
Statistics = tuple[Sequence[float], Sequence[float]]

STATISTICS: dict[str, Statistics] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "stl10": ((0.4914, 0.4823, 0.4466), (0.2470, 0.2430, 0.2610)),
}
"""Mean and standard deviation per channel; other data sets use ImageNet's."""


def statistics(dataset: str, crop: Crop) -> Statistics:
    """Mean and standard deviation: a data set's own, or those of an entry of ``augmentations``.

    >>> statistics("custom", Crop(crop_size=8, mean=[0.5] * 3, std=[0.2] * 3))
    ([0.5, 0.5, 0.5], [0.2, 0.2, 0.2])
    """
    if dataset in STATISTICS:
        return STATISTICS[dataset]
    return crop.mean or IMAGENET_DEFAULT_MEAN, crop.std or IMAGENET_DEFAULT_STD


def fixed_view(cfg: CommonConfig) -> tuple[int, Statistics]:
    """Side and statistics of the fixed views of a config: those of its first augmentation.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> fixed_view(check_run(compose("digits/simclr")))
    (32, ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    """
    first = cfg.augmentations[0]
    return first.crop_size, statistics(cfg.data.dataset, first)


def eval_transform(size: int, mean: Sequence[float], std: Sequence[float]) -> Transform:
    """The transform from an image to its fixed view for evaluation.

    Images whose sides already are ``size`` are left alone; others are scaled so that a centre crop
    of ``size`` keeps 7/8 of the shorter side, as is usual for 256 and 224. Images whose
    shorter side is below ``size`` are scaled up to it.

    >>> eval_transform(32, (0.5,) * 3, (0.5,) * 3)(Image.new("RGB", (50, 40))).shape
    torch.Size([3, 32, 32])
    """
    steps = [FixedView(size), T.ToTensor(), T.Normalize(mean, std)]
    return T.Compose(steps)  # type: ignore[no-any-return]


class FixedView:
    """The geometry of :func:`eval_transform`, PIL image to PIL image.

    >>> FixedView(224)(Image.new("RGB", (400, 320))).size
    (224, 224)
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        if image.size == (self.size, self.size):
            return image
        shorter = self.size if min(image.size) <= self.size else round(self.size * 8 / 7)
        resized = T.functional.resize(image, shorter, T.InterpolationMode.BICUBIC)
        return T.functional.center_crop(resized, [self.size])  # type: ignore[no-any-return]


class GaussianBlur:
    """Blurs with a radius drawn uniformly from :data:`BLUR_RADIUS`.

    >>> GaussianBlur()(Image.new("RGB", (12, 12))).size
    (12, 12)
    """

    def __call__(self, image: Image.Image) -> Image.Image:
        radius = torch.empty(()).uniform_(*BLUR_RADIUS).item()
        return image.filter(ImageFilter.GaussianBlur(radius))


class MultiCrop:
    """Makes all crops of an image: ``counts[i]`` crops by ``transforms[i]``.

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
