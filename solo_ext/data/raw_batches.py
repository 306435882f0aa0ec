"""Batches of whole images as uint8 tensors, whose crops are made on the training device.

All images have one size; they are held in memory, or decoded on access.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import datasets

from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import (
    Images,
    UnreadableImage,
    name_of,
    read_sample,
    targets_of,
    unwrapped,
)
from solo_ext.data.views import SampleKey, TrainingViews

_MOST_BYTES = 8 << 30
"""Largest decoded size that ``data.in_memory`` accepts."""


class DecodedPixels:
    """Decodes images on access; all have the size of the first.

    >>> from PIL import Image
    >>> pixels = DecodedPixels([(Image.new("RGB", (10, 8)), 3)] * 5)
    >>> indices, images, targets = pixels.read([3, 1])
    >>> indices.tolist(), images.shape, targets.tolist()
    ([3, 1], torch.Size([2, 3, 8, 10]), [3, 3])
    """

    def __init__(self, images: Images) -> None:
        self.images = images
        self.width, self.height = read_sample(images, 0)[1][0].size

    def read(self, samples: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Indices, pixels (N, 3, H, W) and targets of samples, or of those that replace them.

        Raises:
            UnreadableImage: as :func:`solo_ext.data.reading.read_sample`, or an image does not have
                the size of the first.
        """
        pixels = torch.empty(len(samples), 3, self.height, self.width, dtype=torch.uint8)
        served, targets = [], []
        for place, asked in enumerate(samples):
            sample, (image, target) = read_sample(self.images, asked)
            if image.size != (self.width, self.height):
                # A worker passes this error on as one line, others as a traceback.
                raise UnreadableImage(
                    f"data.augmentation='batch': image {name_of(self.images, sample)!r} has "
                    f"{image.width} x {image.height} pixels, the first {self.width} x "
                    f"{self.height}; take image, or scale them to one size beforehand"
                )
            # Copy, because torch needs writable memory.
            array = np.array(image.convert("RGB"))
            pixels[place] = torch.from_numpy(array).permute(2, 0, 1)
            served.append(sample)
            targets.append(target)
        return torch.tensor(served), pixels, torch.tensor(targets)


class HeldPixels:
    """Reads images from memory.

    Args:
        pixels: (M, 3, H, W), uint8; not copied.
        targets: targets of all its images (M,).
        rows: row of every sample (N,); all rows by default.
        served: sample that each of ``rows`` belongs to (N,), if some replace unreadable ones.

    >>> pixels = HeldPixels(np.zeros((5, 3, 8, 8), dtype=np.uint8), targets=[0, 1, 2, 3, 4])
    >>> indices, images, targets = pixels.read([3, 1])
    >>> indices.tolist(), images.shape, targets.tolist()
    ([3, 1], torch.Size([2, 3, 8, 8]), [3, 1])
    """

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        targets: Sequence[int] | Tensor,
        rows: Sequence[int] | None = None,
        served: Tensor | None = None,
    ) -> None:
        self.pixels, self.targets = pixels, torch.as_tensor(targets)
        self.rows = np.arange(len(pixels)) if rows is None else np.asarray(rows)
        self.served = torch.arange(len(self.rows)) if served is None else served
        self.height, self.width = pixels.shape[2:]

    def read(self, samples: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Reads samples, as :meth:`DecodedPixels.read`."""
        asked = np.asarray(samples)
        rows = self.rows[asked]
        # Use NumPy: indexing a tensor by rows takes several times as long.
        images = torch.from_numpy(self.pixels[rows]).contiguous()
        return self.served[asked], images, self.targets[rows]


Pixels = DecodedPixels | HeldPixels


def open_pixels(images: Images, in_memory: bool) -> Pixels:
    """Reads images as tensors: from torchvision's arrays, from memory, or one by one.

    Raises:
        ConfigError: with ``in_memory`` they are too many to hold.
        UnreadableImage: with ``in_memory`` images have several sizes.

    >>> from PIL import Image
    >>> type(open_pixels([(Image.new("RGB", (10, 8)), 3)] * 5, in_memory=True)).__name__
    'HeldPixels'
    """
    # Images that are already in memory cannot be unreadable.
    source, rows = unwrapped(images, range(len(images)))
    if isinstance(source, datasets.CIFAR10):
        return HeldPixels(source.data.transpose(0, 3, 1, 2), targets_of(source), rows)
    if isinstance(source, datasets.STL10):
        return HeldPixels(source.data, targets_of(source), rows)
    decoded = DecodedPixels(images)
    if not in_memory:
        return decoded
    size = 3 * len(images) * decoded.height * decoded.width
    if size > _MOST_BYTES:
        problem = f"takes {size / 2**30:.1f} GiB per process"
        raise ConfigError("data.in_memory", True, problem, "take false")
    served, pixels, targets = decoded.read(range(len(images)))
    return HeldPixels(pixels.numpy(), targets, served=served)


class RawBatch(NamedTuple):
    """A batch of N samples before augmentation.

    Augmentation draws for ``epoch`` and the samples that were ``asked`` for, so that a sample that
    replaces an unreadable one gets other crops than it has as itself. The images (N, 3, H, W),
    uint8, and targets are those of ``indices``.

    >>> images, two = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([3, 1])
    >>> batch = RawBatch(0, asked=two, indices=two, images=images, targets=torch.tensor([0, 2]))
    >>> batch.images.shape, batch.indices.tolist()
    (torch.Size([2, 3, 8, 8]), [3, 1])
    """

    epoch: int
    asked: Tensor
    indices: Tensor
    images: Tensor
    targets: Tensor


class RawBatches(TrainingViews):
    """A training set that is read batch by batch, by ``pixels``.

    >>> from PIL import Image
    >>> images = [(Image.new("RGB", (10, 8)), 3)] * 5
    >>> raw = RawBatches(images, open_pixels(images, in_memory=False))
    >>> raw.__getitems__([SampleKey(epoch=0, sample=3), SampleKey(epoch=0, sample=1)]).images.shape
    torch.Size([2, 3, 8, 10])
    """

    def __init__(self, images: Images, pixels: Pixels) -> None:
        super().__init__(images)
        self.pixels = pixels

    def __getitem__(self, key: SampleKey) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawBatch:
        """The batch of some samples of one epoch."""
        asked = [key.sample for key in keys]
        return RawBatch(keys[0].epoch, torch.tensor(asked), *self.pixels.read(asked))

    @staticmethod
    def collate(batch: RawBatch) -> RawBatch:
        """Returns the batch, which needs no collating."""
        return batch
