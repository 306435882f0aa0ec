"""Debiased contrastive learning (Chuang et al., NeurIPS 2020, arXiv 2007.00224).

Negatives drawn at random are of the anchor's own class with probability tau_plus. SimCLR whose sum
over the N = 2B - 2 other views, ``s_k = z . z_k / T``, is corrected for them::

    g = max((mean_k exp(s_k) - tau_plus exp(s_p)) / (1 - tau_plus), exp(-1 / T))   # Eq. 7 and 8
    loss = mean -log(exp(s_p) / (exp(s_p) + N g))

The step is :class:`solo_ext.methods.contrastive.Contrastive`, the loss
:func:`solo_ext.losses.debiased_loss_func`. With more than two crops the estimate takes the mean
over all other crops of the image for ``exp(s_p)``, M of the paper.
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
