"""What the margin losses share: a softmax whose target column is made harder."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision


def margin_cross_entropy(
    cosine: Tensor,
    target: Tensor,
    harden: Callable[[Tensor], Tensor],
    scale: float,
    feature_norm: Tensor | None = None,
) -> Tensor:
    """Cross-entropy over scaled cosines, that of the target hardened.

    Args:
        cosine: (N, C).
        target: (N,) integers in [0, C).
        harden: from (N, 1) cosines of the targets to what takes their place.
        scale: above 0.
        feature_norm: (N,) by which a row's logits are multiplied besides, at least 0.

    Returns:
        Scalar mean.

    Raises:
        ValueError: shapes do not fit, or the scale is not positive.
    """
    if cosine.ndim != 2 or target.shape != cosine.shape[:1]:
        raise ValueError(
            f"cosine must be (N, C) and target (N,), got {tuple(cosine.shape)} and "
            f"{tuple(target.shape)}"
        )
    if feature_norm is not None and feature_norm.shape != target.shape:
        raise ValueError(
            f"feature_norm must be ({target.shape[0]},), one per row, got "
            f"{tuple(feature_norm.shape)}"
        )
    if not scale > 0:
        raise ValueError(f"scale={scale}: must be above 0")
    (cosine,) = full_precision(cosine)
    column = target.unsqueeze(1)
    logits = scale * cosine.scatter(1, column, harden(cosine.gather(1, column)))
    if feature_norm is not None:
        logits = logits * feature_norm.to(logits.dtype).unsqueeze(1)
    return F.cross_entropy(logits, target)
