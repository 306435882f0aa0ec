"""Contrastive learning with hard negative samples (Robinson et al., ICLR 2021, arXiv 2010.04592).

Negatives are drawn in proportion to ``exp(beta s_k)``, and the mean over them is debiased. There
are N = 2B - 2 views of other images::

    z = g(f(x)) of every crop; s_k = z . z_k / (|z| |z_k| T)                             # SimCLR
    R = sum_k exp((1 + beta) s_k) / sum_k exp(beta s_k)         # Eq. 4, by importance sampling
    g = max((R - tau_plus exp(s_p)) / (1 - tau_plus), exp(-1 / T))                  # as debiased
    loss = mean -log(exp(s_p) / (exp(s_p) + N g))                                   # as debiased

z is from ``training_step`` of :class:`solo_ext.methods.contrastive.Contrastive`. The others
read the same in :func:`solo_ext.losses.contrastive.plain_contrastive`; what runs is equal to it, in
logarithms. As published, negatives come from the batch; with ``negatives: queue`` they come from
queues of a momentum encoder's keys.
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
