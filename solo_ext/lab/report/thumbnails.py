"""Small pictures for a page, encoded within a budget of bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

from solo_ext.lab.evaluation.sample import Sample

SIDES = (128, 96, 80, 64, 48)
"""Longer sides of thumbnails in pixels, the best first."""
_QUALITY = 60
_TRIED = 48
_WORKERS = 4


class Thumbnails:
    """The thumbnails of images; those that cannot be read count as ``unreadable`` and are empty.

    They are WebP, which needs two thirds of JPEG's bytes at this size.

    >>> red = Image.new("RGB", (90, 60), "red")
    >>> thumbnails = Thumbnails(Sample(["red.png"], np.eye(1), lambda row: red))
    >>> Image.open(io.BytesIO(thumbnails.encode([0], side=48)[0])).size
    (48, 32)
    """

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.unreadable: set[int] = set()
        self._format = "WEBP" if features.check("webp") else "JPEG"

    def encode(self, rows: Sequence[int] | NDArray[Any], side: int) -> list[bytes]:
        """Encoded thumbnails of the rows, their longer sides at most ``side`` pixels."""
        with ThreadPoolExecutor(_WORKERS) as pool:
            return list(pool.map(lambda row: self._one(int(row), side), rows))

    def largest_side(self, rows: Sequence[int] | NDArray[Any], most_bytes: int) -> tuple[int, int]:
        """The largest side at which thumbnails of the rows take at most so many bytes.

        Returns:
            The side, and for how many of the rows there is room at that side; sizes are estimated
            from a sample.
        """
        drawn = np.random.default_rng(0).permutation(np.asarray(rows))[:_TRIED]
        for side in SIDES:
            mean = float(np.mean([len(image) for image in self.encode(drawn, side)] or [0]))
            if mean * len(rows) <= most_bytes:
                return side, len(rows)
        return SIDES[-1], int(most_bytes / mean)

    def _one(self, row: int, side: int) -> bytes:
        try:
            image = self.sample.open_image(row).convert("RGB")
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
            written = io.BytesIO()
            image.save(written, self._format, quality=_QUALITY)
            return written.getvalue()
        except Exception:
            # A damaged file raises errors of nearly every type. The page tells how many there are.
            self.unreadable.add(row)
            return b""
