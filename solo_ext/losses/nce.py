"""Noise-contrastive estimation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import full_precision
from solo_ext.losses.registry import LOSSES


@LOSSES.register(
    "nce_loss_func",
    paper="Noise-contrastive estimation: A new estimation principle for unnormalized "
    "statistical models",
    year=2010,
)
def nce_loss_func(data_logits: Tensor, noise_logits: Tensor) -> Tensor:
    """Logistic regression that tells data from noise.

    ``-log s(l(x)) - sum_k log(1 - s(l(x_k)))``, s the logistic function, mean over the data;
    ``l = log p(.) - log(K q(.))``, p the model, which need not be normalised, q the noise.

    Args:
        data_logits: (N,) l of the data.
        noise_logits: (N,) or (N, K) l of the noise drawn for each, summed over K.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes do not fit.

    Source:
        Gutmann and Hyvärinen, AISTATS 2010.
    """
    if data_logits.ndim != 1:
        raise ValueError(f"data_logits must be (N,), got {tuple(data_logits.shape)}")
    if noise_logits.ndim not in (1, 2) or noise_logits.shape[:1] != data_logits.shape:
        rows = data_logits.shape[0]
        raise ValueError(
            f"noise_logits must be ({rows},) or ({rows}, K) like the data's, got "
            f"{tuple(noise_logits.shape)}"
        )
    data, noise = full_precision(data_logits, noise_logits)
    rejected = F.logsigmoid(-noise)
    if rejected.ndim == 2:
        rejected = rejected.sum(1)
    return -(F.logsigmoid(data) + rejected).mean()
