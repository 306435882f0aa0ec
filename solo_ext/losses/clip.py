"""The symmetric loss of CLIP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "clip_loss_func",
    paper="Learning Transferable Visual Models From Natural Language Supervision",
    year=2021,
    arxiv="2103.00020",
)
def clip_loss_func(image: Tensor, text: Tensor, logit_scale: Tensor | float) -> Tensor:
    """Cross-entropy of each image's text among all texts and of each text's image among all.

    ``(CE(s I T^T) + CE(s T I^T)) / 2``, row i of either matrix having the label i, s the scale
    and I, T the normalised rows of the joined batch (Figure 3).

    Args:
        image: (N, D); normalised inside.
        text: (N, D), row i is of image i; normalised inside. Equal texts of two images count as
            each other's negatives.
        logit_scale: the multiplier itself, not its logarithm: one number, above 0, with gradient
            where it is learned. The paper starts at 1 / 0.07 and caps it at 100.

    Returns:
        Scalar; zero that carries the graph for a single pair.

    Raises:
        ValueError: shapes do not fit, or a scale given as a number is not positive.

    Source:
        Radford et al., ICML 2021, arXiv 2103.00020.
    """
    _check(image, text, logit_scale)
    image, text = full_precision(image, text)
    if isinstance(logit_scale, Tensor):
        logit_scale = logit_scale.to(image.dtype)
    with full_precision_products(image.device):
        image, text = F.normalize(image, dim=1), F.normalize(text, dim=1)
        rows = image.shape[0]
        own = torch.arange(rows, device=image.device) + distributed.rank() * rows
        to_text = logit_scale * image @ distributed.gather_with_gradient(text).T
        to_image = logit_scale * text @ distributed.gather_with_gradient(image).T
        return (F.cross_entropy(to_text, own) + F.cross_entropy(to_image, own)) / 2


def _check(image: Tensor, text: Tensor, logit_scale: Tensor | float) -> None:
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(
            f"image and text must both be (N, D), got {tuple(image.shape)} and {tuple(text.shape)}"
        )
    if isinstance(logit_scale, Tensor):
        if logit_scale.numel() != 1:
            raise ValueError(
                f"logit_scale has the shape {tuple(logit_scale.shape)}: must be one number"
            )
    elif not logit_scale > 0:
        raise ValueError(f"logit_scale={logit_scale}: must be above 0")
