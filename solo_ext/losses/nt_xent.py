"""NT-Xent, the loss of SimCLR."""

from __future__ import annotations

from torch import Tensor

from solo_ext.losses.registry import LOSSES
from solo_ext.losses.two_views import two_view_loss


@LOSSES.register(
    "nt_xent_loss_func",
    paper="A Simple Framework for Contrastive Learning of Visual Representations",
    year=2020,
    arxiv="2002.05709",
)
def nt_xent_loss_func(z1: Tensor, z2: Tensor, temperature: float = 0.5) -> Tensor:
    """Normalised temperature-scaled cross-entropy of each view against all others.

    ``-log(exp(s+) / (exp(s+) + sum_k exp(s_k)))``, s the cosine over the temperature, k over the
    2N - 2 other samples of both views; mean over the 2N anchors (Eq. 1).

    Args:
        z1: (N, D) first view; normalised inside.
        z2: (N, D) second view; normalised inside.
        temperature: above 0.

    Returns:
        Scalar; zero that carries the graph for N = 1, where there is no negative.

    Raises:
        ValueError: shapes differ or are not (N, D), or the temperature is not positive.

    Source:
        Chen et al., ICML 2020, arXiv 2002.05709.
    """
    return two_view_loss(z1, z2, temperature)
