"""The symmetric loss of CLIP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision_products
from solo_ext.losses.common import LOSSES, check_positive, unit_rows
from solo_ext.losses.contrastive import own_columns


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

    Example:
        >>> import torch
        >>> image, text = torch.eye(3), torch.eye(3)
        >>> clip_loss_func(image, text, logit_scale=100.0) < 1e-4
        tensor(True)
    """
    image, text = unit_rows(image=image, text=text)
    if not isinstance(logit_scale, Tensor):
        check_positive(logit_scale=logit_scale)
    elif logit_scale.numel() != 1:
        raise ValueError(
            f"logit_scale has the shape {tuple(logit_scale.shape)}: must be one number"
        )
    else:
        logit_scale = logit_scale.to(image.dtype)
    with full_precision_products(image.device):
        own = own_columns(image).squeeze(1)
        to_text = logit_scale * image @ distributed.gather_with_gradient(text).T
        to_image = logit_scale * text @ distributed.gather_with_gradient(image).T
        return (F.cross_entropy(to_text, own) + F.cross_entropy(to_image, own)) / 2
