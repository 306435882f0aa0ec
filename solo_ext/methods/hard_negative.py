"""Contrastive learning with hard negative samples."""

from __future__ import annotations

from solo_ext.config.types import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProbabilityBelowOne,
    method_kwargs,
)
from solo_ext.methods.contrastive import Contrastive
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.registry import METHODS


@method_kwargs
class HardNegativeKwargs(ContrastiveKwargs):
    """``method_kwargs`` of :class:`HardNegative`; defaults of the official code."""

    proj_hidden_dim: PositiveInt = 512
    temperature: PositiveFloat = 0.5
    tau_plus: ProbabilityBelowOne = 0.1
    beta: NonNegativeFloat = 1.0


@METHODS.register(
    "hard_negative",
    paper="Contrastive Learning with Hard Negative Samples",
    year=2021,
    arxiv="2010.04592",
)
class HardNegative(Contrastive):
    """SimCLR whose negatives weigh by similarity (Robinson et al., ICLR 2021, arXiv 2010.04592).

    As published negatives are of the batch; ``negatives: queue`` contrasts with momentum queues.
    """

    kwargs_type = HardNegativeKwargs
