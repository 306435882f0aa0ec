"""What a data set of images is to those that read it."""

from __future__ import annotations

from typing import Literal, Protocol

from PIL import Image

Split = Literal["train", "val"]
Item = tuple[Image.Image, int]


class Images(Protocol):
    """A sized, indexable collection of (image, target)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...
