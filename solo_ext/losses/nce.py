"""Noise-contrastive estimation, CPC's InfoNCE with a bilinear critic, and CLIP's loss."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.losses.common import LOSSES, check_positive, unit_rows
from solo_ext.losses.contrastive import own_columns


@LOSSES.register(
    "nce_loss_func",
    paper="Noise-contrastive estimation: A new estimation principle for unnormalized "
    "statistical models",
    year=2010,
)
def nce_loss_func(data_logits: Tensor, noise_logits: Tensor) -> Tensor:
    """Logistic regression that tells data from noise.

    ``-log s(l(x)) - sum_k log(1 - s(l(x_k)))``, s the logistic function, mean over the data;
    ``l = log p(.) - log(K q(.))``, p the model, which need not be normalised, q the noise (Gutmann
    and Hyvärinen, AISTATS 2010).

    Args:
        data_logits: (N,) l of the data.
        noise_logits: (N,) or (N, K) l of the noise samples of each datum, summed over K.

    Example:
        >>> import torch
        >>> nce_loss_func(torch.zeros(4), torch.zeros(4, 10))  # 11 ln 2
        tensor(7.6246)
    """
    if data_logits.ndim != 1:
        raise ValueError(f"data_logits must be (N,), got {tuple(data_logits.shape)}")
    rows, shape = len(data_logits), tuple(noise_logits.shape)
    if len(shape) not in (1, 2) or shape[0] != rows:
        raise ValueError(f"noise_logits must be ({rows},) or ({rows}, K), got {shape}")
    data, noise = full_precision(data_logits, noise_logits)
    rejected = F.logsigmoid(-noise)
    if rejected.ndim == 2:
        rejected = rejected.sum(1)
    return -(F.logsigmoid(data) + rejected).mean()


@LOSSES.register(
    "bilinear_info_nce_loss_func",
    paper="Representation Learning with Contrastive Predictive Coding",
    year=2018,
    arxiv="1807.03748",
)
def bilinear_info_nce_loss_func(
    query: Tensor, context: Tensor, weight: Tensor, temperature: float = 1.0
) -> Tensor:
    """Cross-entropy of each query's own context among the contexts of the joined batch.

    ``-log(f(z_i, c_i) / sum_j f(z_i, c_j))`` with ``f(z, c) = exp(z^T W c / T)`` (Eq. 3 and 4 of
    van den Oord et al., 2018), mean over the queries. The paper's sum runs over z for one c: pass
    ``context, query, weight.T`` for that. With K steps into the future, each with its own W,
    ``f_k(z, c) = exp(z_{t+k}^T W_k c_t / T)``, and the loss is also the mean over the steps; the
    negatives of a step are taken from the same step.

    Args:
        query: (N, D1) z, any scale; or (K, N, D1), one for each step.
        context: (N, D2) c, any scale; row i belongs to query i; or (K, N, D2).
        weight: (D1, D2) W; or (K, D1, D2), one for each step. A query or context without a
            dimension of steps is then used in all steps.
        temperature: T, above 0; the paper has no temperature, which equals 1.

    Example:
        >>> import torch
        >>> query, context, weight = torch.randn(4, 8), torch.randn(4, 6), torch.zeros(8, 6)
        >>> bilinear_info_nce_loss_func(query, context, weight).allclose(torch.tensor(4.0).log())
        True

        Contexts that predict three steps, in the paper's direction:

        >>> now, later, weights = torch.randn(4, 6), torch.randn(3, 4, 8), torch.randn(3, 6, 8)
        >>> bilinear_info_nce_loss_func(now, later, weights).allclose(torch.stack(
        ...     [bilinear_info_nce_loss_func(now, z, w) for z, w in zip(later, weights)]
        ... ).mean())
        True
    """
    of_query, of_context = tuple(query.shape), tuple(context.shape)
    steps = weight.shape[:-2]
    known = all(len(s) == 2 or (len(s) == 3 and s[:1] == steps) for s in (of_query, of_context))
    if not known or of_query[-2] != of_context[-2]:
        raise ValueError(
            "query must be (N, D1) and context (N, D2), or with the steps of a weight (K, D1, D2) "
            f"before them, got {of_query} and {of_context}"
        )
    widths = of_query[-1], of_context[-1]
    if weight.ndim not in (2, 3) or weight.shape[-2:] != widths:
        raise ValueError(f"weight must be {widths} or (K, *{widths}), got {tuple(weight.shape)}")
    check_positive(temperature=temperature)
    query, context, weight = full_precision(query, context, weight)
    with full_precision_products(query.device):
        # Gathering joins along the first dimension, so move the rows there and back.
        candidates = distributed.gather_with_gradient(context.movedim(-2, 0)).movedim(0, -2)
        logits = query @ weight @ candidates.mT / temperature
        own = own_columns(query.movedim(-2, 0)).squeeze(1)
        return F.cross_entropy(logits.flatten(0, -2), own.repeat(math.prod(steps)))


@LOSSES.register(
    "clip_loss_func",
    paper="Learning Transferable Visual Models From Natural Language Supervision",
    year=2021,
    arxiv="2103.00020",
)
def clip_loss_func(image: Tensor, text: Tensor, logit_scale: Tensor | float) -> Tensor:
    """Mean of two cross-entropies: of each image's text among all, and of each text's image.

    ``(CE(s I T^T) + CE(s T I^T)) / 2``, row i of either matrix having the label i, s the scale
    and I, T the normalised rows of the joined batch (Figure 3 of Radford et al., ICML 2021).

    Args:
        image: (N, D); normalised inside.
        text: (N, D), row i belongs to image i; normalised inside. Equal texts of two images count
            as each other's negatives.
        logit_scale: s itself, not its logarithm: one number, above 0, with gradient if it is
            learned. The paper starts at 1 / 0.07 and caps it at 100.

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
        shape = tuple(logit_scale.shape)
        raise ValueError(f"logit_scale has the shape {shape}: must be one number")
    else:
        logit_scale = logit_scale.to(image.dtype)
    with full_precision_products(image.device):
        own = own_columns(image).squeeze(1)
        to_text = logit_scale * image @ distributed.gather_with_gradient(text).T
        to_image = logit_scale * text @ distributed.gather_with_gradient(image).T
        return (F.cross_entropy(to_text, own) + F.cross_entropy(to_image, own)) / 2
