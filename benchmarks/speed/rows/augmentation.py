"""Views per second and core of the augmentation on the batch, from decoded images in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from benchmarks.interleaved import Work, by_clock, ratios, take_turns
from benchmarks.speed.operation import installed, not_installed
from benchmarks.speed.target import Effort, Finding, Measured, Target
from benchmarks.speed.turns import made_images
from solo_ext.config.schema import Augmentation
from solo_ext.core.files import config_root
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.transforms import pretrain_transform

IMAGES, BATCH = 2000, 256
CASES = (
    (32, "cifar", 32),
    (32, "small32", 32),
    (64, "mocov2_128", 64),
    (96, "small32", 32),
    (128, "mocov2_128", 128),
)
"""Side of the images, name of the augmentations, side of the crops."""
CIFAR = {"torchvision": 5.0, "kornia": 3.0}
"""Times faster than what, at CIFAR's size; the other cases have no target."""

Pipelines = Sequence[Augmentation]


class Batches:
    """The next images at every call, in the same order for every source."""

    def __init__(self, count: int, batch: int) -> None:
        self.count, self.batch, self.next = count, batch, 0

    def __call__(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        first, self.next = self.next, self.next + self.batch
        return np.arange(first, self.next) % self.count


def by_torchvision(images: list[Image.Image], pipelines: Pipelines, batch: int) -> Work:
    """torchvision's transforms, image by image, collated."""
    transform, batches = pretrain_transform("custom", pipelines), Batches(len(images), batch)

    def work() -> list[torch.Tensor]:
        views = [transform(images[i]) for i in batches()]
        return [torch.stack(crops) for crops in zip(*views, strict=True)]

    return work


def on_the_batch(images: list[Image.Image], pipelines: Pipelines, batch: int) -> Work:
    """Ours: drawn and computed for the batch."""
    pixels = as_tensor(images)
    augment = BatchAugment("custom", pipelines, *pixels.shape[2:], 5)
    batches = Batches(len(images), batch)

    def work() -> list[torch.Tensor]:
        samples = batches()
        return augment(pixels[samples], augment.draw(0, samples))

    return work


def by_kornia(images: list[Image.Image], pipelines: Pipelines, batch: int) -> Work:
    """kornia's augmentations of a batch with the same settings."""
    import kornia.augmentation as K

    pixels, batches = as_tensor(images), Batches(len(images), batch)
    made = []
    for p in pipelines:
        size, scale = p.crop_size, (p.rrc.crop_min_scale, p.rrc.crop_max_scale)
        steps = [
            K.RandomResizedCrop((size, size), scale=scale, resample="bicubic"),
            K.ColorJitter(*p.color_jitter.strengths, p=p.color_jitter.prob),
            K.RandomGrayscale(p=p.grayscale.prob),
            K.RandomGaussianBlur((size // 20 * 2 + 1,) * 2, (0.1, 2.0), p=p.gaussian_blur.prob),
            K.RandomSolarize(p=p.solarization.prob),
            K.RandomHorizontalFlip(p=p.horizontal_flip.prob),
            K.Normalize(torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])),
        ]
        # One that is never taken would still cost its draws.
        taken = [step for step in steps if step.p > 0]
        made += [K.AugmentationSequential(*taken, data_keys=["input"])] * p.num_crops

    @torch.no_grad()
    def work() -> list[torch.Tensor]:
        x = pixels[batches()].float() / 255
        return [augment(x) for augment in made]

    return work


def as_tensor(images: list[Image.Image]) -> torch.Tensor:
    """(n, 3, H, W) uint8."""
    return (
        torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).contiguous()
    )


def case(effort: Effort, side: int, name: str, size: int) -> Measured:
    """All sources on the same images, by the time of the process on its core."""
    augmentations = config_root() / "solo_ext" / "augmentations" / f"{name}.yaml"
    entries = yaml.safe_load(augmentations.read_text())
    pipelines = [Augmentation(**e).model_copy(update={"crop_size": size}) for e in entries]
    batch = effort.size(BATCH)
    images = made_images(effort.size(IMAGES), side)
    given = images, pipelines, batch
    works = {"batch": on_the_batch(*given), "again": on_the_batch(*given)}
    works["torchvision"] = by_torchvision(*given)
    if installed("kornia"):
        works["kornia"] = by_kornia(*given)
    timer = by_clock(time.process_time)
    seconds = take_turns(works, effort.rounds, min(effort.warm, 2), timer)
    views = batch * sum(p.num_crops for p in pipelines)
    rates = {k: views / float(np.median(v)) for k, v in seconds.items()}
    label = f"augmentation {name}, {side} px to {size}"
    findings = []
    for peer, times in CIFAR.items():
        target = Target(times) if name == "cifar" else None
        if peer not in works:
            findings.append(Finding(label, target, peer=peer, note=not_installed(peer)))
            continue
        measured, again = ratios(seconds, peer, "batch")[1], ratios(seconds, "again", "batch")[1]
        note = f"{rates['batch']:,.0f} views/s"
        findings.append(Finding(label, target, measured, peer=peer, again=again, note=note))
    quartiles = {k: ratios(seconds, k, "batch") for k in seconds}
    return Measured(findings, {"views_per_second": rates, "ratios": quartiles})


def measure(effort: Effort) -> Measured:
    """All sizes."""
    parts = {f"{side} px, {name}": case(effort, side, name, size) for side, name, size in CASES}
    findings = [f for part in parts.values() for f in part.findings]
    return Measured(findings, {k: part.details for k, part in parts.items()})
