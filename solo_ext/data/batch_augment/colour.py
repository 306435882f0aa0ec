"""Colour jitter and grey of a batch, every image with its own parameters and order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue (ITU-R BT.601), as in PIL."""

_NO_CHROMA = 1e-12


def jitter_(images: Tensor, affine: Tensor, hue: Tensor | None, stops: Sequence[int]) -> Tensor:
    """Brightness, contrast, saturation and hue in each image's order, clamped after each.

    The first three are ``clamp(a x + b grey(x) + c mean(grey(x)), 0, 1)`` with the weights of
    torchvision's ``adjust_*``.

    Args:
        images: (N, 3, H, W) in [0, 1], changed in place; what is not jittered comes last.
        affine: weights a, b, c of every step (N, steps, 3).
        hue: shift in turns (N,), or ``None``.
        stops: rows ``stops[p]`` to ``stops[p + 1]`` have hue after p steps; what follows the last
            is left alone.
    """
    jittered = images[: stops[-1]]
    steps = affine.shape[1]
    for step in range(steps + 1):
        start, stop = stops[step], stops[step + 1]
        if hue is not None and stop > start:
            shift_hue_(images[start:stop], hue[start:stop])
        if step < steps and len(jittered):
            _affine_(jittered, *affine[: len(jittered), step].unbind(1))
    return images


def mix_channels(images: Tensor, matrices: Tensor, bias: Tensor) -> Tensor:
    """``matrix @ pixel + bias`` for every pixel.

    Args:
        images: (N, 3, H, W).
        matrices: (N, 3, 3).
        bias: (N, 3), (N, 1) or (3,).
    """
    flat = images.flatten(2)
    return torch.baddbmm(bias.unsqueeze(-1), matrices, flat).view_as(images)


def towards_grey(keep: Tensor, grey: Tensor) -> Tensor:
    """Matrices (N, 3, 3) of ``keep x + grey * grey(x)``, weights (N,)."""
    row = torch.stack([grey * weight for weight in GREY], 1)
    return torch.diag_embed(keep.unsqueeze(1).expand(-1, 3)) + row.unsqueeze(1)


def shift_hue_(images: Tensor, turns: Tensor) -> Tensor:
    """Turns the hue in HSV and keeps saturation and value, as torchvision's ``adjust_hue``.

    With value V, chroma C and m = V - C the hue in sixths of a turn is
    ``1 + (G + B - R - m) / C`` with the sign of ``G - B``, and the channels of hue h are
    ``m + C clamp(|6 frac((h + k) / 6) - 3| - 1, 0, 1)``, k = 0, 4, 2.

    Args:
        images: (N, 3, H, W), changed in place.
        turns: (N,) in [-0.5, 0.5].
    """
    red, green, blue = images.unbind(1)
    low = images.amin(1)
    chroma = images.amax(1).sub_(low)
    distance = (green + blue).sub_(red).sub_(low).div_(chroma.clamp_min(_NO_CHROMA)).add_(1)
    hue = torch.copysign(distance, green - blue)
    thirds = torch.arange(3, 0, -1, device=images.device).view(3, 1, 1) % 3 / 3
    # One turn more, since the `frac` of a negative number is negative.
    angle = torch.add(turns.view(-1, 1, 1, 1) + 1 + thirds, hue.unsqueeze(1), alpha=1 / 6)
    wave = angle.frac_().sub_(0.5).abs_().mul_(6).sub_(1).clamp_(0, 1)
    return torch.addcmul(low.unsqueeze(1), chroma.unsqueeze(1), wave, out=images)


def _affine_(images: Tensor, keep: Tensor, grey: Tensor, mean: Tensor) -> None:
    red, green, blue = images.flatten(2).mean(2).unbind(1)
    average = GREY[0] * red + GREY[1] * green + GREY[2] * blue
    mixed = mix_channels(images, towards_grey(keep, grey), (mean * average).unsqueeze(1))
    torch.clamp(mixed, 0, 1, out=images)
