"""PIL's Gaussian blur as a matrix product along each axis."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.data.batch_augment.crop import resample

_PASSES = 3


def blur(images: Tensor, radius: Tensor) -> Tensor:
    """Blurs every image with its own radius.

    Args:
        images: (N, C, H, W).
        radius: standard deviation in pixels (N,).
    """
    height, width = images.shape[-2:]
    rows = blur_matrices(radius, height)
    return resample(images, rows, rows if height == width else blur_matrices(radius, width))


def blur_matrices(radius: Tensor, size: int) -> Tensor:
    """What PIL's ``GaussianBlur`` does along one axis: (N, size, size).

    Three box blurs whose variances add up to that of the Gaussian; the boxes have a weight of
    their own at both ends (Gwosdek et al., "Theoretical foundations of Gaussian convolution by
    extended box filtering", SSVM 2011). The outermost pixels are repeated.

    Args:
        radius: standard deviation in pixels (N,).
        size: length of the axis.
    """
    box = _boxes(_box_radius(radius), size)
    return box @ box @ box


def _box_radius(radius: Tensor) -> Tensor:
    variance = radius**2 / _PASSES
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor()
    end = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    return whole + end / (6 * (variance - (whole + 1) ** 2))


def _boxes(radius: Tensor, size: int) -> Tensor:
    """Box filters of half-width ``radius`` (N,), the part beyond an end on its last pixel."""
    radius = radius.view(-1, 1, 1)
    place = torch.arange(size, device=radius.device, dtype=radius.dtype)
    # Pixel q covers q - 1/2 to q + 1/2; the first and last reach on for ever.
    upper, lower = place + 0.5, place - 0.5
    far = torch.full_like(place[:1], 4.0 * size)
    upper = torch.cat((upper[:-1], far))
    lower = torch.cat((-far, lower[1:]))
    left, right = place[:, None] - radius - 0.5, place[:, None] + radius + 0.5
    covered = torch.minimum(upper, right) - torch.maximum(lower, left)
    return covered.clamp_min(0) / (2 * radius + 1)
