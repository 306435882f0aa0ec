"""Margin losses of face recognition: softmax cross-entropy with a lowered target logit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision
from solo_ext.losses.common import LOSSES, check_not_negative, check_positive


def _margin_cross_entropy(
    cosine: Tensor,
    target: Tensor,
    harden: Callable[[Tensor], Tensor],
    scale: float,
    feature_norm: Tensor | None = None,
) -> Tensor:
    """Cross-entropy over scaled cosines, after ``harden`` replaced the targets' cosines (N, 1)."""
    rows = tuple(target.shape)
    if cosine.ndim != 2 or rows != cosine.shape[:1]:
        raise ValueError(
            f"cosine must be (N, C) and target (N,), got {tuple(cosine.shape)} and {rows}"
        )
    if feature_norm is not None and feature_norm.shape != rows:
        raise ValueError(f"feature_norm must be {rows}, got {tuple(feature_norm.shape)}")
    check_positive(scale=scale)
    (cosine,) = full_precision(cosine)
    column = target.unsqueeze(1)
    logits = scale * cosine.scatter(1, column, harden(cosine.gather(1, column)))
    if feature_norm is not None:
        logits = logits * feature_norm.to(logits.dtype).unsqueeze(1)
    return F.cross_entropy(logits, target)


@LOSSES.register(
    "arcface_loss_func",
    paper="ArcFace: Additive Angular Margin Loss for Deep Face Recognition",
    year=2018,
    arxiv="1801.07698",
)
def arcface_loss_func(
    cosine: Tensor, target: Tensor, scale: float = 64.0, margin: float = 0.5, monotone: bool = True
) -> Tensor:
    """Cross-entropy over scaled cosines, with a margin added to the target's angle.

    ``-log(exp(s cos(theta_y + m)) / (exp(s cos(theta_y + m)) + sum_{j != y} exp(s cos theta_j)))``
    (Eq. 3 of Deng et al., CVPR 2019), mean over the rows; s the scale, m the margin.

    Args:
        cosine: (N, C) of features with class weights.
        target: (N,) integers in [0, C).
        scale: s, above 0.
        margin: m in radians, in [0, pi).
        monotone: whether to replace ``cos(theta + m)``, which rises again for theta beyond pi - m,
            by ``cos theta - m sin m`` there, as in the authors' code; for a margin up to 2.3 the
            loss then never falls as theta grows.

    Returns:
        Scalar. The gradient is that of the formula, except at a target's cosine of 1 or -1: there
        the gradient would be infinite, so the sine is treated as a constant.

    Example:
        >>> cosine, target = torch.rand(4, 10), torch.tensor([0, 3, 3, 9])
        >>> arcface_loss_func(cosine, target, scale=8.0, margin=0.0).allclose(
        ...     F.cross_entropy(8.0 * cosine, target)
        ... )
        True
    """
    if not 0 <= margin < math.pi:
        raise ValueError(f"margin={margin}: must lie in [0, pi), in radians")

    def harden(own: Tensor) -> Tensor:
        moved = own * math.cos(margin) - _sine(own) * math.sin(margin)
        if not monotone:
            return moved
        lowered = own - margin * math.sin(margin)
        return torch.where(own >= -math.cos(margin), moved, lowered)

    return _margin_cross_entropy(cosine, target, harden, scale)


def _sine(cosine: Tensor) -> Tensor:
    """Sine of the angle; 0 without gradient if |cosine| is 1, or larger due to rounding."""
    squared = (1 - cosine) * (1 + cosine)
    inside = squared > 0
    return torch.where(inside, torch.where(inside, squared, 1.0).sqrt(), 0.0)


@LOSSES.register(
    "cosface_loss_func",
    paper="CosFace: Large Margin Cosine Loss for Deep Face Recognition",
    year=2018,
    arxiv="1801.09414",
)
def cosface_loss_func(
    cosine: Tensor, target: Tensor, scale: float = 64.0, margin: float = 0.35
) -> Tensor:
    """Cross-entropy over scaled cosines, with a margin subtracted from the target's cosine.

    ``-log(exp(s (cos_y - m)) / (exp(s (cos_y - m)) + sum_{j != y} exp(s cos_j)))`` (Eq. 4 of Wang
    et al., CVPR 2018), mean over the rows; s the scale, m the margin.

    Args:
        cosine: (N, C) of features with class weights.
        target: (N,) integers in [0, C).
        scale: s, above 0.
        margin: m, at least 0.

    Example:
        >>> cosine, target = torch.tensor([[0.9, 0.1]]), torch.tensor([0])
        >>> cosface_loss_func(cosine, target, scale=1.0, margin=0.8)  # both cosines are now 0.1
        tensor(0.6931)
    """
    check_not_negative(margin=margin)
    return _margin_cross_entropy(cosine, target, lambda own: own - margin, scale)


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
    annealing: float = 0.0,
) -> Tensor:
    """Cross-entropy over cosines, with the target's angle multiplied by the margin.

    The target's cosine is replaced by ``psi(theta) = (-1)^k cos(m theta) - 2 k``, with k the
    integer part of ``m theta / pi``; psi falls from 1 to 1 - 2 m. All logits are multiplied by the
    scale and the norm of the feature. Mean over the rows (Liu et al., CVPR 2017). With annealing,
    psi is replaced by ``(lambda cos theta + psi(theta)) / (1 + lambda)``: the authors decrease
    lambda from 1,000 to 5 during training, and the method ``metric`` can do the same.

    Args:
        cosine: (N, C) of features with class weights.
        target: (N,) integers in [0, C).
        scale: above 0.
        margin: m, an integer of at least 1.
        feature_norm: (N,) norms |x| of the features, as in the paper; all 1 by default.
        annealing: lambda, at least 0.

    Example:
        >>> cosine, target = torch.rand(4, 10), torch.tensor([0, 3, 3, 9])
        >>> sphereface_loss_func(cosine, target, margin=1).allclose(F.cross_entropy(cosine, target))
        True
    """
    if not isinstance(margin, int) or margin < 1:
        raise ValueError(f"margin={margin}: must be a whole number of at least 1")
    check_not_negative(annealing=annealing)

    def harden(own: Tensor) -> Tensor:
        return (annealing * own + _psi(own, margin)) / (1 + annealing)

    return _margin_cross_entropy(cosine, target, harden, scale, feature_norm)


def _psi(cosine: Tensor, margin: int) -> Tensor:
    """``(-1)^k cos(m theta) - 2 k``, with cos(m theta) as a Chebyshev polynomial of cos theta."""
    before, multiple = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):
        before, multiple = multiple, 2 * cosine * multiple - before
    # Stop at k = m - 1: at a cosine of -1, k = m gives the same value, but the opposite slope.
    turns = torch.zeros_like(cosine)
    for j in range(1, margin):
        turns = turns + (cosine <= math.cos(j * math.pi / margin))
    return (1 - 2 * (turns % 2)) * multiple - 2 * turns
