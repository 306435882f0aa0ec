"""What the augmentation of a batch draws: the parameters of a view, a row for each image."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from solo_ext.config.schema import Augmentation, ColorJitter
from solo_ext.core.draws import Floats, Keys, uniforms
from solo_ext.data.transforms import BLUR_RADIUS

Draws = NDArray[np.float32]

TOP, LEFT, HEIGHT, WIDTH, FLIP = range(5)
"""Columns of a row: the crop in pixels, and whether it is mirrored (0 or 1)."""
PLACE, HUE = 5, 6
"""How many other steps of the jitter come before its hue (4: no jitter), and its shift in turns."""
GRAY, RADIUS, SOLARIZED, EQUALIZED = range(7, 11)
"""Whether an image turns grey; the blur's radius in pixels (0: none); two more that are 0 or 1."""
AFFINE = 11
"""From here on, for four steps of the jitter other than hue, in the image's order: the weights of
the image, of its grey version, and of the mean of that. Those that do nothing are (1, 0, 0).
"""
STEPS = 4
COLUMNS = AFFINE + 3 * STEPS
NO_JITTER = 4

_TRIES = 10
_RATIO = (3 / 4, 4 / 3)
_CONTRAST, _SATURATION, _HUE = 1, 2, 3
_ORDERS = np.array(list(itertools.permutations(range(4))))

_CHANCES = ("color_jitter", "grayscale", "gaussian_blur", "solarization", "equalization")
_BOX, _ORDER, _RADIUS, _FLIP, _APPLIED = 2 * _TRIES + 2, 22, 27, 28, 29
_PER_VIEW = 64
"""Each view reserves 64 numbers of a sample's random stream and uses 34: 22 for the crop box, one
for the order of the jitter, 4 for its factors, one each for blur and flip, and 5 for ``_CHANCES``.
"""


def draw_view(
    augmentation: Augmentation, keys: Keys, number: int, height: int, width: int
) -> Draws:
    """Draws the parameters of view ``number`` of the samples with ``keys`` (N,), to (N, COLUMNS).

    >>> from solo_ext.core.draws import sample_keys
    >>> keys = sample_keys(5, 0, np.arange(4))
    >>> draw_view(Augmentation(crop_size=8, num_crops=2), keys, 0, height=12, width=12).shape
    (4, 23)
    """
    draws = uniforms(keys, number * _PER_VIEW, _APPLIED + len(_CHANCES))
    applied = {
        name: draws[:, _APPLIED + place] < getattr(augmentation, name).prob
        for place, name in enumerate(_CHANCES)
    }
    drawn = np.zeros((len(keys), COLUMNS), dtype=np.float32)
    rrc = augmentation.rrc
    if rrc.enabled:
        scale = (rrc.crop_min_scale, rrc.crop_max_scale)
        drawn[:, TOP:FLIP] = crop_boxes(draws[:, :_BOX], height, width, scale)
    else:
        drawn[:, TOP:FLIP] = 0, 0, height, width
    drawn[:, FLIP] = draws[:, _FLIP] < augmentation.horizontal_flip.prob
    affine, hue, place = _jitter(augmentation.color_jitter, draws[:, _ORDER:_RADIUS])
    jittered = applied["color_jitter"]
    drawn[:, PLACE] = np.where(jittered, place, NO_JITTER)
    drawn[:, HUE] = hue
    steps = drawn[:, AFFINE:].reshape(len(keys), STEPS, 3)
    steps[:, :, 0] = 1
    steps[jittered, : affine.shape[1]] = affine[jittered]
    drawn[:, GRAY] = applied["grayscale"]
    low, high = BLUR_RADIUS
    drawn[:, RADIUS] = applied["gaussian_blur"] * (low + (high - low) * draws[:, _RADIUS])
    drawn[:, SOLARIZED] = applied["solarization"]
    drawn[:, EQUALIZED] = applied["equalization"]
    return drawn


def _jitter(jitter: ColorJitter, draws: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Weights (N, steps, 3) of the steps except hue, hue shift (N,), position of hue (N,)."""
    strengths = np.array(jitter.strengths)
    low = np.where(np.arange(4) == _HUE, -strengths, np.maximum(0, 1 - strengths))
    high = np.where(np.arange(4) == _HUE, strengths, 1 + strengths)
    factors = low + (high - low) * draws[:, 1:5]
    # A strength of 0 drops its step; the orders of the other steps stay equally likely.
    steps = [[s for s in o if s != _HUE and strengths[s]] for o in _ORDERS.tolist()]
    before = [sum(bool(strengths[s]) for s in o[: o.index(_HUE)]) for o in _ORDERS.tolist()]
    chosen = (draws[:, 0] * len(_ORDERS)).astype(np.int64)
    step = np.array(steps, dtype=np.int64)[chosen]
    factor = np.take_along_axis(factors, step, 1)
    weights = (factor, (1 - factor) * (step == _SATURATION), (1 - factor) * (step == _CONTRAST))
    place = np.array(before)[chosen] if strengths[_HUE] else np.zeros(len(draws), np.int64)
    return np.stack(weights, 2), factors[:, _HUE], place


def crop_boxes(
    draws: Floats, height: int, width: int, scale: tuple[float, float]
) -> NDArray[np.int64]:
    """Boxes (N, 4), top, left, height and width, as ``RandomResizedCrop.get_params`` draws them.

    The area is uniform in ``scale``, the ratio log-uniform from 3/4 to 4/3, and sides are rounded;
    the first of ten tries that fits is taken, else the largest centred box of such a ratio.
    ``draws`` (N, 22) are uniform.

    >>> crop_boxes(np.full((1, 22), 0.5), height=32, width=32, scale=(0.25, 0.25))
    array([[ 8,  8, 16, 16]])
    """
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, :_TRIES])
    low, high = (math.log(r) for r in _RATIO)
    ratio = np.exp(low + (high - low) * draws[:, _TRIES : 2 * _TRIES])
    # `rint` rounds halves to even, like Python's `round`.
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
