"""What tests of data sets make: a section ``data``, image files, and a comparison of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from solo_ext.config.schema import Images


def section(path: Path | str | None, **given: Any) -> Images:
    """A section ``data`` with one path for both splits."""
    base = {"dataset": "custom", "train_path": str(path), "val_path": str(path)}
    return Images(**{**base, **given})


def save_image(path: Path, seed: int, side: int = 12) -> None:
    """Writes noise, coloured or, for odd seeds, grey."""
    shape = (side, side) if seed % 2 else (side, side, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def same(a: Any, b: Any) -> bool:
    """Whether nested lists of tensors are equal bit by bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
