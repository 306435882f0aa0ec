"""Contrastive learning with hard negative samples (Robinson et al., ICLR 2021, arXiv 2010.04592).

Negatives are drawn in proportion to ``exp(beta s_k)``, s the cosine over the temperature T, and the
mean over them is debiased. Two views ``z = g(f(x))``, N = 2B - 2 others in the batch::

    R = sum_k exp((1 + beta) s_k) / sum_k exp(beta s_k)              # Eq. 4, importance sampling
    g = max((R - tau_plus exp(s_p)) / (1 - tau_plus), exp(-1 / T))   # as in debiased
    loss = mean -log(exp(s_p) / (exp(s_p) + N g))

The step is :class:`solo_ext.methods.contrastive.Contrastive`, the loss
:func:`solo_ext.losses.hard_negative_loss_func`. As published negatives are of the batch;
``negatives: queue`` contrasts with momentum queues.
"""

from __future__ import annotations

from solo_ext.core.types import NonNegativeFloat, PositiveFloat, PositiveInt, ProbabilityBelowOne
from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.registry import METHODS


class HardNegativeKwargs(ContrastiveKwargs):
    """``method_kwargs`` of ``hard_negative``; defaults of the official code.

    Example:
        >>> HardNegativeKwargs(beta=0.5).tau_plus
        0.1
    """

    proj_hidden_dim: PositiveInt = 512
    temperature: PositiveFloat = 0.5
    tau_plus: ProbabilityBelowOne = 0.1
    beta: NonNegativeFloat = 1.0


HardNegative = METHODS.register(
    "hard_negative",
    paper="Contrastive Learning with Hard Negative Samples",
    year=2021,
    arxiv="2010.04592",
)(Preset(HardNegativeKwargs))
