"""Images that stand in for those that cannot be read."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.data import Dataset, Subset

from solo_ext.data.images import Images, Item
from solo_ext.data.reading import UnreadableImage

MOST_IN_A_ROW = 100
"""So many samples in a row without a readable one are no bad luck: a disk is gone."""


class Skipping(Dataset[Any]):
    """Images of which those that cannot be read are to be skipped.

    Args:
        images: raise :class:`UnreadableImage` for them.
    """

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return self.images[index]

    def readable(self, index: int) -> tuple[int, Item]:
        """The first readable sample from ``index`` on, past the end from the start again.

        Returns:
            Its own index, and image and target.

        Raises:
            UnreadableImage: there is none among the next :data:`MOST_IN_A_ROW`.
        """
        tried = min(len(self), MOST_IN_A_ROW)
        for place in range(index, index + tried):
            with contextlib.suppress(UnreadableImage):
                return place % len(self), self.images[place % len(self)]
        raise too_many(tried, self.images, place % len(self))


def too_many(count: int, images: Any, last: int) -> UnreadableImage:
    """The error of ``count`` samples in a row, up to ``last``, that cannot be read."""
    return UnreadableImage(
        f"data.unreadable='skip': none of {count} images in a row can be read, the last "
        f"{name_of(images, last)!r} ({reason_of(images, last)}); look whether the data set is "
        "whole and its disk there"
    )


def read_sample(images: Images, index: int) -> tuple[int, Item]:
    """A sample, or the one that stands in for it where unreadable ones are skipped.

    Returns:
        The index of the sample that is given, and image and target.

    Raises:
        UnreadableImage: unreadable images are refused, or there are too many.
    """
    if isinstance(images, Skipping):
        return images.readable(index)
    return index, images[index]


def name_of(images: Any, index: int) -> str:
    """Where a sample is kept: a path, or what its data set calls it."""
    if isinstance(images, Skipping):
        return name_of(images.images, index)
    if isinstance(images, Subset):
        return name_of(images.dataset, images.indices[index])
    if hasattr(images, "name_of"):
        return str(images.name_of(index))
    if hasattr(images, "samples"):
        return str(images.samples[index][0])
    return f"sample {index}"


def reason_of(images: Images, index: int) -> str:
    """What is wrong with a sample, found by reading it again."""
    try:
        images[index]
    except UnreadableImage as error:
        return error.reason
    return "it could not be read; now it can"


def passed_over(asked: int, served: int, size: int) -> list[int]:
    """Indices of the samples that :meth:`Skipping.readable` left out on the way."""
    return [(asked + step) % size for step in range((served - asked) % size)]
