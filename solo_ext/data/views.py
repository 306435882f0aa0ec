"""Data sets of views, for training and for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from solo_ext.core.draws import mix
from solo_ext.data.reading import Images, Skipping, UnreadableImage, read_sample
from solo_ext.data.sampler import SampleKey
from solo_ext.data.transforms import MultiCrop, Transform


class TrainingViews(Dataset[tuple[int, list[Tensor], int]]):
    """``(index, crops, target)``, crops drawn from (seed, epoch, index) alone.

    If another sample replaces an unreadable one, index and target are its own. Its crops are drawn
    for the requested sample, so that they differ from those that it has as itself.

    Args:
        images: the images.
        transform: makes the crops.
        seed: seed of the run.

    >>> from PIL import Image
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 4
    >>> views = TrainingViews(images, MultiCrop([ToTensor()], [2]), seed=5)
    >>> index, crops, target = views[SampleKey(epoch=0, sample=1)]
    >>> index, [tuple(crop.shape) for crop in crops], target
    (1, [(3, 8, 8), (3, 8, 8)], 3)
    """

    def __init__(self, images: Images, transform: MultiCrop, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: SampleKey) -> tuple[int, list[Tensor], int]:
        epoch, index = key
        served, (image, target) = read_sample(self.images, index)
        # Without workers this process also trains, so restore its generator afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix(self.seed, epoch, index))
            return served, self.transform(image), target


class FixedViews(Dataset[tuple[Tensor, int] | None]):
    """``(view, target)`` with a fixed transform; ``None`` for an unreadable image to be skipped.

    Args:
        images: the images.
        transform: of one image.

    >>> from PIL import Image
    >>> from torchvision.transforms import ToTensor
    >>> view, target = FixedViews([(Image.new("RGB", (8, 8)), 3)], ToTensor())[0]
    >>> view.shape, target
    (torch.Size([3, 8, 8]), 3)
    """

    def __init__(self, images: Images, transform: Transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        try:
            image, target = self.images[index]
        except UnreadableImage:
            if not isinstance(self.images, Skipping):
                raise
            return None
        return self.transform(image), target
