"""Images that need no data set: only what they cost counts, not what they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
_GRID = 8


def made_images(count: int, side: int, seed: int = 0) -> list[Image.Image]:
    """Smooth random images: as JPEG files they are about as large as photographs of their size.

    Args:
        count: how many.
        side: of each, in pixels.
        seed: of what they show.
    """
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (count, _GRID, _GRID, 3), dtype=np.uint8)
    return [Image.fromarray(c).resize((side, side), Image.Resampling.BICUBIC) for c in coarse]


def write_folders(root: Path, count: int, side: int) -> None:
    """Writes them as JPEG files in class folders, ``<root>/<class>/<number>.jpg``."""
    for number, image in enumerate(made_images(count, side)):
        folder = root / str(number % CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.jpg", quality=85)
