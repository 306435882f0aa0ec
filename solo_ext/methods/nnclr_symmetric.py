"""NNCLR with its symmetric loss (Dwibedi et al., ICCV 2021, arXiv 2104.14548).

The positive of a view is the nearest neighbour of its image's other view in the support set Q::

    z = g(f(x)) of every crop, p = h(z) the predictions                         # training_step
    nn = NN(z, Q) = argmin_{x in Q} |z - x|                               Eq. 4 # _neighbours
    rows = mean_i -log(exp(nn_i.p_i / T) / sum_k exp(nn_i.p_k / T))       Eq. 3 # plain_nnclr
    columns = mean_i -log(exp(nn_i.p_i / T) / sum_k exp(nn_k.p_i / T))          # plain_nnclr
    loss = (rows + columns) / 2, the mean over both directions
    z of the first view enters Q                                                # on_train_batch_end

The step is that of :class:`solo_ext.methods.contrastive.Contrastive`. ``plain_nnclr`` in
:mod:`solo_ext.losses.nnclr` reads like these lines; what runs is equal to it. The ``nnclr`` of
solo-learn has no columns.
"""

from __future__ import annotations

from typing import Literal

from solo_ext.core.types import NonNegativeInt, PositiveFloat, PositiveInt
from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.registry import METHODS


class NNCLRSymmetricKwargs(ContrastiveKwargs):
    """``method_kwargs`` of ``nnclr_symmetric``; defaults of the paper.

    Example:
        >>> NNCLRSymmetricKwargs().positives
        'nearest_neighbor'
    """

    proj_output_dim: PositiveInt = 256
    proj_layers: PositiveInt = 3
    proj_last_batch_norm: bool = True
    pred_hidden_dim: NonNegativeInt = 4096
    temperature: PositiveFloat = 0.1
    positives: Literal["view", "nearest_neighbor", "prototype"] = "nearest_neighbor"


NNCLRSymmetric = METHODS.register(
    "nnclr_symmetric",
    paper="With a Little Help from My Friends: Nearest-Neighbor Contrastive Learning of Visual "
    "Representations",
    year=2021,
    arxiv="2104.14548",
)(Preset(NNCLRSymmetricKwargs))
