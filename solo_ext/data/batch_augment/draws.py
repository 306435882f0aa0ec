"""Random parameters of one view of every image of a batch, drawn as torchvision draws them."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solo_ext.config.schema import Augmentation, ColorJitter
from solo_ext.core.draws import Floats, Keys, uniforms
from solo_ext.data.transforms import BLUR_RADIUS

_TRIES = 10
_RATIO = (3 / 4, 4 / 3)
_CONTRAST, _SATURATION, _HUE = 1, 2, 3
_ORDERS = np.array(list(itertools.permutations(range(4))))

_CHANCES = ("color_jitter", "grayscale", "gaussian_blur", "solarization", "equalization")
_BOX, _ORDER, _RADIUS, _FLIP, _APPLIED = 2 * _TRIES + 2, 22, 27, 28, 29
_PER_VIEW = 64
"""Each view takes 64 numbers of a sample's stream: 22 for the box, one for the order of the jitter,
4 for its factors, one each for blur and mirroring, and one for each of ``_CHANCES``."""


class ViewDraws(NamedTuple):
    """Parameters of one view of N images, on the CPU until the batch is moved.

    Rows are sorted: jittered images come first, by the position of hue among the steps of their
    jitter, so that images with the same position are one slice.

    Attributes:
        rows: the image that each row is of (N,).
        box: top, left, height and width of the crop (N, 4).
        flip: whether it is mirrored, 0 or 1 (N,).
        affine: weights (N, steps, 3) of the image, its grey and the mean of its grey, for the
            steps of the jitter except hue, in each image's order.
        hue: shift in turns (N,); ``None`` for a jitter without hue.
        hue_stops: first row of each position of hue, then of the rows without jitter.
        gray: 0 or 1 (N,).
        blurred: rows that are blurred, ascending.
        radius: radius of each of these, in pixels.
        solarized: rows that are solarised, ascending.
        equalized: rows that are equalised, ascending.
    """

    rows: Tensor
    box: Tensor
    flip: Tensor
    affine: Tensor
    hue: Tensor | None
    hue_stops: tuple[int, ...]
    gray: Tensor
    blurred: Tensor
    radius: Tensor
    solarized: Tensor
    equalized: Tensor

    def part(self, start: int, stop: int) -> ViewDraws:
        """The rows from ``start`` to ``stop``; it reads values, so use it on the CPU only."""
        inside = [
            slice(*np.searchsorted(rows.numpy(), (start, stop)))
            for rows in (self.blurred, self.solarized, self.equalized)
        ]
        return ViewDraws(
            self.rows[start:stop],
            self.box[start:stop],
            self.flip[start:stop],
            self.affine[start:stop],
            None if self.hue is None else self.hue[start:stop],
            tuple(min(max(s, start), stop) - start for s in self.hue_stops),
            self.gray[start:stop],
            self.blurred[inside[0]] - start,
            self.radius[inside[0]],
            self.solarized[inside[1]] - start,
            self.equalized[inside[2]] - start,
        )


def draw_view(
    augmentation: Augmentation, keys: Keys, number: int, height: int, width: int
) -> ViewDraws:
    """Draws the parameters of one view with the distributions of torchvision's transforms.

    Args:
        augmentation: an entry of ``augmentations``.
        keys: of the samples (N,).
        number: index of the view among all views of its batch.
        height: of the images.
        width: of the images.
    """
    draws = uniforms(keys, number * _PER_VIEW, _APPLIED + len(_CHANCES))
    applied = {
        name: draws[:, _APPLIED + place] < getattr(augmentation, name).prob
        for place, name in enumerate(_CHANCES)
    }
    jitter = augmentation.color_jitter
    affine, hue, place = _jitter(jitter, draws[:, _ORDER:_RADIUS], draws[:, _ORDER])
    unjittered = affine.shape[1] + 1
    group = np.where(applied["color_jitter"], place, unjittered)
    rows = np.argsort(group, kind="stable")
    stops = np.searchsorted(group[rows], np.arange(unjittered + 1))
    rrc = augmentation.rrc
    if rrc.enabled:
        scale = (rrc.crop_min_scale, rrc.crop_max_scale)
        box = crop_boxes(draws[:, :_BOX], height, width, scale)
    else:
        box = np.tile(np.array((0, 0, height, width)), (len(keys), 1))
    blurred = np.flatnonzero(applied["gaussian_blur"][rows])
    low, high = BLUR_RADIUS
    radius = low + (high - low) * draws[rows[blurred], _RADIUS]
    flip = draws[:, _FLIP] < augmentation.horizontal_flip.prob
    return ViewDraws(
        torch.from_numpy(rows),
        torch.from_numpy(box[rows]),
        torch.from_numpy(flip[rows].astype(np.int64)),
        _floats(affine[rows]),
        _floats(hue[rows]) if jitter.hue else None,
        tuple(stops.tolist()),
        _floats(applied["grayscale"][rows]),
        torch.from_numpy(blurred),
        _floats(radius),
        torch.from_numpy(np.flatnonzero(applied["solarization"][rows])),
        torch.from_numpy(np.flatnonzero(applied["equalization"][rows])),
    )


def _jitter(
    jitter: ColorJitter, draws: Floats, order: Floats
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Weights of the steps except hue (N, steps, 3), hue (N,) and its position among them (N,)."""
    strengths = np.array(jitter.strengths)
    low = np.where(np.arange(4) == _HUE, -strengths, np.maximum(0, 1 - strengths))
    high = np.where(np.arange(4) == _HUE, strengths, 1 + strengths)
    factors = low + (high - low) * draws[:, 1:5]
    # A strength of 0 drops its step; the orders of the other steps stay equally likely.
    steps = [[s for s in o if s != _HUE and strengths[s]] for o in _ORDERS.tolist()]
    before = [sum(bool(strengths[s]) for s in o[: o.index(_HUE)]) for o in _ORDERS.tolist()]
    chosen = (order * len(_ORDERS)).astype(np.int64)
    step = np.array(steps, dtype=np.int64)[chosen]
    factor = np.take_along_axis(factors, step, 1)
    weights = (factor, (1 - factor) * (step == _SATURATION), (1 - factor) * (step == _CONTRAST))
    place = np.array(before)[chosen] if strengths[_HUE] else np.zeros(len(order), np.int64)
    return np.stack(weights, 2), factors[:, _HUE], place


def _floats(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def crop_boxes(
    draws: Floats, height: int, width: int, scale: tuple[float, float]
) -> NDArray[np.int64]:
    """Boxes of crops with a share of the area in ``scale`` and a side ratio from 3/4 to 4/3.

    As ``torchvision.transforms.RandomResizedCrop.get_params``: the area is uniform, the ratio
    log-uniform, and sides are rounded; it takes the first of ten tries that fits, else the largest
    centred box whose ratio is in range.

    Args:
        draws: uniform numbers (N, 22).
        height: of the images.
        width: of the images.
        scale: smallest and largest share of the area.

    Returns:
        (N, 4): top, left, height, width.

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
