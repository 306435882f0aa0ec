"""The order of the samples, and the views of each: functions of (seed, epoch, index) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from solo_ext.core import distributed
from solo_ext.core.draws import mix, permutation
from solo_ext.data.reading import Images, Skipping, UnreadableImage, read_sample

Crops = Callable[[Image.Image], list[Tensor]]
_AT_ONCE = 4096
"""Entries of the order that are taken at a time."""


class SampleKey(NamedTuple):
    """What the sampler requests: a sample, and the epoch that augmentation draws for."""

    epoch: int
    sample: int


class EpochSampler(Sampler[SampleKey]):
    """A :func:`~solo_ext.core.draws.permutation` by (seed, epoch), divided among the ranks.

    Every rank yields the same number of samples: a remainder that does not divide evenly is left
    out of that epoch.

    ``num_replicas`` and ``rank`` are those of ``torch.distributed`` by default.

    >>> sampler = EpochSampler(5, seed=0, num_replicas=2, rank=0)
    >>> [key.sample for key in sampler]
    [2, 1]
    """

    def __init__(
        self, size: int, seed: int, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        self.size, self.seed = size, seed
        self._replicas, self._rank = num_replicas, rank
        self.epoch = 0
        self.start = 0

    def _share(self) -> tuple[int, int]:
        # Ask at every pass, because loaders are built before the process group.
        replicas = self._replicas or distributed.world_size()
        return replicas, distributed.rank() if self._rank is None else self._rank

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, starting at its first sample unless it is already the current one."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self.size // self._share()[0]

    def __iter__(self) -> Iterator[SampleKey]:
        replicas, rank = self._share()
        epoch = self.epoch
        entries = permutation(self.size, mix(self.seed, epoch))
        count = len(self)
        for first in range(self.start, count, _AT_ONCE):
            own = np.arange(first, min(first + _AT_ONCE, count))
            for index in entries(own * replicas + rank).tolist():
                yield SampleKey(epoch, index)


class TrainingViews(Dataset[tuple[int, list[Tensor], int]]):
    """``(index, crops, target)``, crops drawn from (seed, epoch, index) alone.

    If another sample replaces an unreadable one, index and target are its own. Its crops are drawn
    for the requested sample, so that they differ from those that it has as itself.

    Args:
        images: the training images.
        transform: from an image to its crops; none where something else makes them.
        seed: seed of the run.

    >>> from solo_ext.data.transforms import MultiCrop
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 4
    >>> views = TrainingViews(images, MultiCrop([ToTensor()], [2]), seed=5)
    >>> index, crops, target = views[SampleKey(epoch=0, sample=1)]
    >>> index, [tuple(crop.shape) for crop in crops], target
    (1, [(3, 8, 8), (3, 8, 8)], 3)
    """

    def __init__(self, images: Images, transform: Crops | None = None, seed: int = 0) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: SampleKey) -> tuple[int, list[Tensor], int]:
        epoch, index = key
        served, (image, target) = read_sample(self.images, index)
        assert self.transform is not None
        # Without workers this process also trains, so restore its generator afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix(self.seed, epoch, index))
            return served, self.transform(image), target


class FixedViews(Dataset[tuple[Tensor, int] | None]):
    """``(view, target)`` with a fixed transform; ``None`` for an unreadable image to be skipped.

    >>> from torchvision.transforms import ToTensor
    >>> view, target = FixedViews([(Image.new("RGB", (8, 8)), 3)], ToTensor())[0]
    >>> view.shape, target
    (torch.Size([3, 8, 8]), 3)
    """

    def __init__(self, images: Images, transform: Callable[[Image.Image], Tensor]) -> None:
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
