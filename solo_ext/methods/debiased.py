"""Debiased contrastive learning (Chuang et al., NeurIPS 2020, arXiv 2007.00224).

Negatives drawn at random have the anchor's class with probability tau_plus. The loss is that of
SimCLR, whose sum over the N = 2B - 2 views of other images is corrected for these false negatives::

    z = g(f(x)) of every crop; s_k = z . z_k / (|z| |z_k| T)                             # SimCLR
    g = max((mean_k exp(s_k) - tau_plus exp(s_p)) / (1 - tau_plus), exp(-1 / T))         # Eq. 7
    loss = mean -log(exp(s_p) / (exp(s_p) + N g))                                        # Eq. 8

z is from ``training_step`` of :class:`solo_ext.methods.contrastive.Contrastive`. The others
read the same in :func:`solo_ext.losses.contrastive.plain_contrastive`; what runs is equal to it, in
logarithms. With more than two crops, the estimate replaces ``exp(s_p)`` by its mean over the other
crops of the image, of which the paper has M.
"""

from __future__ import annotations

from solo_ext.core.types import PositiveFloat, PositiveInt, ProbabilityBelowOne
from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.registry import METHODS


class DebiasedKwargs(ContrastiveKwargs):
    """``method_kwargs`` of ``debiased``; defaults of the official code.

    Example:
        >>> DebiasedKwargs().tau_plus
        0.1
    """

    proj_hidden_dim: PositiveInt = 512
    temperature: PositiveFloat = 0.5
    tau_plus: ProbabilityBelowOne = 0.1


Debiased = METHODS.register(
    "debiased", paper="Debiased Contrastive Learning", year=2020, arxiv="2007.00224"
)(Preset(DebiasedKwargs))
