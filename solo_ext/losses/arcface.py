"""ArcFace: an angle added to that of the target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solo_ext.losses.margin import margin_cross_entropy
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "arcface_loss_func",
    paper="ArcFace: Additive Angular Margin Loss for Deep Face Recognition",
    year=2018,
    arxiv="1801.07698",
)
def arcface_loss_func(
    cosine: Tensor, target: Tensor, scale: float = 64.0, margin: float = 0.5, monotone: bool = True
) -> Tensor:
    """Cross-entropy over scaled cosines after the target's angle has grown by a margin.

    ``-log(exp(s cos(theta_y + m)) / (exp(s cos(theta_y + m)) + sum_{j != y} exp(s cos theta_j)))``
    (Eq. 3), mean over the rows; s the scale, m the margin.

    Args:
        cosine: (N, C) of features with class weights.
        target: (N,) integers in [0, C).
        scale: s, above 0.
        margin: m in radians, in [0, pi).
        monotone: whether beyond pi - m, where ``cos(theta + m)`` rises again, ``cos theta - m sin
            m`` takes its place; for a margin up to 2.3 the loss then never falls as theta grows.

    Returns:
        Scalar. The gradient is that of the formula, but at a target's cosine of 1 or -1, where
        that is infinite and the sine counts as a constant.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Deng et al., CVPR 2019, arXiv 1801.07698; the monotone form as in the authors' code.
    """
    if not 0 <= margin < math.pi:
        raise ValueError(f"margin={margin}: must lie in [0, pi), in radians")

    def harden(own: Tensor) -> Tensor:
        moved = own * math.cos(margin) - _sine(own) * math.sin(margin)
        if not monotone:
            return moved
        lowered = own - margin * math.sin(margin)
        return torch.where(own >= -math.cos(margin), moved, lowered)

    return margin_cross_entropy(cosine, target, harden, scale)


def _sine(cosine: Tensor) -> Tensor:
    """Sine of the angle; 0 without gradient where rounding has left a cosine of 1 or more."""
    squared = (1 - cosine) * (1 + cosine)
    inside = squared > 0
    return torch.where(inside, torch.where(inside, squared, 1.0).sqrt(), 0.0)
