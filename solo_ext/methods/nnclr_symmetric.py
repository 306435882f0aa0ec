"""Nearest-neighbour contrastive learning, as published."""

from __future__ import annotations

from typing import Literal

from solo_ext.config.types import NonNegativeInt, PositiveFloat, PositiveInt, method_kwargs
from solo_ext.methods.contrastive import Contrastive
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.registry import METHODS


@method_kwargs
class NNCLRSymmetricKwargs(ContrastiveKwargs):
    """``method_kwargs`` of :class:`NNCLRSymmetric`; defaults of the paper."""

    proj_output_dim: PositiveInt = 256
    proj_layers: PositiveInt = 3
    proj_last_batch_norm: bool = True
    pred_hidden_dim: NonNegativeInt = 4096
    temperature: PositiveFloat = 0.1
    positives: Literal["view", "nearest_neighbor", "prototype"] = "nearest_neighbor"


@METHODS.register(
    "nnclr_symmetric",
    paper="With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning of Visual "
    "Representations",
    year=2021,
    arxiv="2104.14548",
)
class NNCLRSymmetric(Contrastive):
    """NNCLR with its symmetric loss (Dwibedi et al., ICCV 2021, arXiv 2104.14548).

    Neighbours are looked up before the step's own embeddings enter the support set. solo-learn's
    ``nnclr`` lacks the symmetric term.
    """

    kwargs_type = NNCLRSymmetricKwargs
