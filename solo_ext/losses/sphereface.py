"""SphereFace: the target's angle multiplied."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solo_ext.losses.margin import margin_cross_entropy
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "sphereface_loss_func",
    paper="SphereFace: Deep Hypersphere Embedding for Face Recognition",
    year=2017,
    arxiv="1704.08063",
)
def sphereface_loss_func(
    cosine: Tensor,
    target: Tensor,
    scale: float = 1.0,
    margin: int = 4,
    feature_norm: Tensor | None = None,
) -> Tensor:
    """Cross-entropy over cosines after the target's angle has been multiplied by the margin.

    The target's cosine is replaced by ``psi(theta) = (-1)^k cos(m theta) - 2 k``, k the whole
    part of ``m theta / pi``, which falls from 1 to 1 - 2 m; all are multiplied by the scale and
    the norm of the feature. Mean over the rows.

    Args:
        cosine: (N, C) of features with class weights.
        target: (N,) integers in [0, C).
        scale: above 0.
        margin: m, a whole number of at least 1.
        feature_norm: (N,) |x|, as in the paper; ``None`` is 1.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Liu et al., CVPR 2017, arXiv 1704.08063; without its annealing, a mean of psi and the
        plain cosine whose weight falls during training.
    """
    if not isinstance(margin, int) or margin < 1:
        raise ValueError(f"margin={margin}: must be a whole number of at least 1")
    return margin_cross_entropy(cosine, target, lambda own: _psi(own, margin), scale, feature_norm)


def _psi(cosine: Tensor, margin: int) -> Tensor:
    """``(-1)^k cos(m theta) - 2 k``, cos(m theta) as a Chebyshev polynomial of the cosine."""
    before, multiple = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):
        before, multiple = multiple, 2 * cosine * multiple - before
    # k = m at a cosine of -1 is left out: the value is that of m - 1, the slope would turn.
    turns = torch.zeros_like(cosine)
    for j in range(1, margin):
        turns = turns + (cosine <= math.cos(j * math.pi / margin))
    return (1 - 2 * (turns % 2)) * multiple - 2 * turns
