"""Batches of whole images, whose crops are made on the training device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solo_ext.core.errors import UserError
from solo_ext.data.datasets import TrainingViews
from solo_ext.data.images import Images
from solo_ext.data.pixels import Pixels
from solo_ext.data.sampler import SampleKey
from solo_ext.data.transforms import MultiCrop


class RawBatch(NamedTuple):
    """A batch before augmentation.

    Attributes:
        epoch: that its augmentation is of.
        asked: the samples that were asked for (N,), which augmentation is drawn for: what stands
            in for an unreadable image gets other crops than it has as itself.
        indices: the samples that are given (N,).
        images: (N, 3, H, W), uint8.
        targets: (N,).
    """

    epoch: int
    asked: Tensor
    indices: Tensor
    images: Tensor
    targets: Tensor


class RawBatches(TrainingViews):
    """A training set that is read batch by batch.

    Args:
        images: the images.
        pixels: what reads them.
    """

    def __init__(self, images: Images, pixels: Pixels) -> None:
        super().__init__(images, MultiCrop([], []), 0)
        self.pixels = pixels

    def __getitem__(self, key: SampleKey) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawBatch | UserError:
        """The batch of some samples of one epoch, or what is wrong with an image of it."""
        try:
            asked = [key.sample for key in keys]
            return RawBatch(keys[0].epoch, torch.tensor(asked), *self.pixels.read(asked))
        except UserError as error:
            # Not raised: a worker's errors arrive as the text of a traceback.
            return UserError(str(error))

    @staticmethod
    def collate(batch: RawBatch | UserError) -> RawBatch | UserError:
        """The batch as it is; it needs no collating."""
        return batch
