"""Triplet loss."""

from __future__ import annotations

from torch import Tensor

from solo_ext.core.precision import full_precision
from solo_ext.losses.distances import row_distances
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "triplet_loss_func",
    paper="FaceNet: A Unified Embedding for Face Recognition and Clustering",
    year=2015,
    arxiv="1503.03832",
)
def triplet_loss_func(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, squared: bool = True
) -> Tensor:
    """Wants the negative further from the anchor than the positive, by a margin.

    ``max(0, d(a, p)^2 - d(a, n)^2 + margin)``, d the Euclidean distance, mean over the triplets
    (section 3.1, where it is a sum).

    Args:
        anchor: (N, D), any scale.
        positive: (N, D), any scale, of the anchors' classes.
        negative: (N, D), any scale, of other classes.
        margin: at least 0.
        squared: whether distances are squared, as in the paper; many libraries do not.

    Returns:
        Scalar; the margin, with gradient 0, where all rows are equal.

    Raises:
        ValueError: shapes differ or are not (N, D), or the margin is negative.

    Source:
        Schroff et al., CVPR 2015, arXiv 1503.03832.
    """
    _check(anchor, positive, negative, margin)
    anchor, positive, negative = full_precision(anchor, positive, negative)
    near, far = row_distances(anchor, positive), row_distances(anchor, negative)
    if squared:
        near, far = near.square(), far.square()
    return (near - far + margin).relu().mean()


def _check(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float) -> None:
    if anchor.ndim != 2 or not anchor.shape == positive.shape == negative.shape:
        raise ValueError(
            f"anchor, positive and negative must all be (N, D), got {tuple(anchor.shape)}, "
            f"{tuple(positive.shape)} and {tuple(negative.shape)}"
        )
    if not margin >= 0:
        raise ValueError(f"margin={margin}: must be at least 0")
