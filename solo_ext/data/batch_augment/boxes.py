"""Crop boxes with the distribution of torchvision's random resized crop."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from solo_ext.core.draws import Floats

TRIES = 10
DRAWS = 2 * TRIES + 2
"""Uniform numbers that a box takes."""

_RATIO = (3 / 4, 4 / 3)


def crop_boxes(
    draws: Floats, height: int, width: int, scale: tuple[float, float]
) -> NDArray[np.int64]:
    """Boxes of crops with a share of the area in ``scale`` and a side ratio from 3/4 to 4/3.

    As ``torchvision.transforms.RandomResizedCrop.get_params``: area uniform, ratio log-uniform,
    sides rounded, the first of ten tries that fits; else the largest centred box whose ratio is
    in range.

    Args:
        draws: uniform numbers (N, ``DRAWS``).
        height: of the images.
        width: of the images.
        scale: least and largest share of the area.

    Returns:
        (N, 4): top, left, height, width.
    """
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, :TRIES])
    low, high = (math.log(r) for r in _RATIO)
    ratio = np.exp(low + (high - low) * draws[:, TRIES : 2 * TRIES])
    # Rounded half to even, as Python's `round`.
    widths = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    heights = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = fits.argmax(1)
    rows = np.arange(len(draws))
    h, w = heights[rows, first], widths[rows, first]
    top = (draws[:, -2] * (height - h + 1)).astype(np.int64)
    left = (draws[:, -1] * (width - w + 1)).astype(np.int64)
    found = np.stack((top, left, h, w), 1)
    return np.where(fits[rows, first, None], found, np.array(_central(height, width)))


def _central(height: int, width: int) -> tuple[int, int, int, int]:
    ratio = width / height
    if ratio < _RATIO[0]:
        h, w = round(width / _RATIO[0]), width
    elif ratio > _RATIO[1]:
        h, w = height, round(height * _RATIO[1])
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w
