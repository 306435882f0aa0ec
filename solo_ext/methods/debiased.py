"""Debiased contrastive learning."""

from __future__ import annotations

from solo_ext.config.types import PositiveFloat, PositiveInt, ProbabilityBelowOne, method_kwargs
from solo_ext.methods.contrastive import Contrastive
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.registry import METHODS


@method_kwargs
class DebiasedKwargs(ContrastiveKwargs):
    """``method_kwargs`` of :class:`Debiased`; defaults of the official code."""

    proj_hidden_dim: PositiveInt = 512
    temperature: PositiveFloat = 0.5
    tau_plus: ProbabilityBelowOne = 0.1


@METHODS.register("debiased", paper="Debiased Contrastive Learning", year=2020, arxiv="2007.00224")
class Debiased(Contrastive):
    """SimCLR with the debiased estimate of the negatives (Chuang et al., 2020, arXiv 2007.00224).

    As published: two views, negatives of the batch. With more crops the estimate takes the mean
    over all other crops of the image as its positives, M of the paper.
    """

    kwargs_type = DebiasedKwargs
