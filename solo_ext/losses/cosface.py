"""CosFace: a margin taken off the target's cosine."""

from __future__ import annotations

from torch import Tensor

from solo_ext.losses.margin import margin_cross_entropy
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "cosface_loss_func",
    paper="CosFace: Large Margin Cosine Loss for Deep Face Recognition",
    year=2018,
    arxiv="1801.09414",
)
def cosface_loss_func(
    cosine: Tensor, target: Tensor, scale: float = 64.0, margin: float = 0.35
) -> Tensor:
    """Cross-entropy over scaled cosines after the target's has been lowered by a margin.

    ``-log(exp(s (cos_y - m)) / (exp(s (cos_y - m)) + sum_{j != y} exp(s cos_j)))`` (Eq. 4), mean
    over the rows; s the scale, m the margin.

    Args:
        cosine: (N, C) of features with class weights.
        target: (N,) integers in [0, C).
        scale: s, above 0.
        margin: m, at least 0.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes do not fit, or a setting is out of range.

    Source:
        Wang et al., CVPR 2018, arXiv 1801.09414.
    """
    if not margin >= 0:
        raise ValueError(f"margin={margin}: must be at least 0")
    return margin_cross_entropy(cosine, target, lambda own: own - margin, scale)
