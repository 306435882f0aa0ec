"""NNCLR with its symmetric loss (Dwibedi et al., ICCV 2021, arXiv 2104.14548).

The positive of a view is the nearest neighbour of its image's other view among past embeddings;
q = h(z) are predictions, Q the support set::

    NN(z, Q) = argmin_{x in Q} |z - x|                                           # Eq. 4
    rows = mean_i -log(exp(NN(z_i, Q).q_i / T) / sum_k exp(NN(z_i, Q).q_k / T))  # Eq. 3
    columns = the same with exp(NN(z_k, Q).q_i / T) in the sum                   # symmetric: true
    loss = (rows + columns) / 2, the mean over both directions
    Q <- z of the first view, after the step

The step is :class:`solo_ext.methods.contrastive.Contrastive`, the loss
:func:`solo_ext.losses.nnclr_symmetric_loss_func`. solo-learn's ``nnclr`` lacks the columns.
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
