"""MoCHi: hard negative mixing (Kalantidis et al., NeurIPS 2020, arXiv 2010.01028).

MoCo v2, InfoNCE of a query with its momentum key k against a queue, to which every query adds
synthetic negatives of the N rows of the queue that are most similar to it::

    h = alpha n_i + (1 - alpha) n_j, normalised, alpha in (0, 1)       # Eq. 4, s of them
    h = beta q + (1 - beta) n_j, normalised, beta in (0, 0.5)          # Eq. 5, s' of them
    loss = mean -log(exp(q.k / T) / (exp(q.k / T) + sum_n exp(q.n / T) + sum_h exp(q.h / T)))

The step is :class:`solo_ext.methods.contrastive.QueueContrastive`, the draws
:class:`solo_ext.methods.negatives.DrawnMixing`, the loss :func:`solo_ext.losses.mochi_loss_func`.
Each direction mines the queue of its own key, after ``mixing.warmup_epochs``.
"""

from __future__ import annotations

from typing import Literal

from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.negatives import MixingKwargs
from solo_ext.methods.registry import METHODS


class MoCHiKwargs(ContrastiveKwargs):
    """``method_kwargs`` of ``mochi``; defaults of the paper's usual (1024, 1024, 128).

    Example:
        >>> MoCHiKwargs().mixing.num_query_mixes
        128
    """

    proj_batch_norm: bool = False
    negatives: Literal["batch", "queue"] = "queue"
    mixing: MixingKwargs = MixingKwargs(num_pair_mixes=1024, num_query_mixes=128)


MoCHi = METHODS.register(
    "mochi",
    paper="Hard Negative Mixing for Contrastive Learning",
    year=2020,
    arxiv="2010.01028",
)(Preset(MoCHiKwargs))
