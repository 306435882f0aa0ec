"""MoCHi: hard negative mixing (Kalantidis et al., NeurIPS 2020, arXiv 2010.01028).

MoCo v2's InfoNCE, with synthetic negatives h that are mixed from the hardest rows of the queue::

    q = g(f(x)), k = g'(f'(x')), of unit length from here on                    # training_step
    n_1 .. n_N = the N rows of the queue most similar to q                      # plain_mochi
    h = alpha n_i + (1 - alpha) n_j, unit, alpha in (0, 1): s of them     Eq. 4 # plain_mochi
    h = beta q + (1 - beta) n_j, unit, beta in (0, 0.5): s' of them       Eq. 5 # plain_mochi
    loss = mean -log(exp(q.k/T) / (exp(q.k/T) + sum_n exp(q.n/T) + sum_h exp(q.h/T)))
    f', g' <- moving averages of f, g, and k enters the queue                   # on_train_batch_end

The step is that of :class:`solo_ext.methods.contrastive.QueueContrastive`; i, j, alpha and beta are
drawn by :class:`solo_ext.methods.negatives.MixingSampler`. ``plain_mochi`` in
:mod:`solo_ext.losses.mochi` reads like these lines; what runs is a kernel that is equal to it.
After ``mixing.warmup_epochs``, each direction of the loss mines the queue of its key's view.
"""

from __future__ import annotations

from typing import Literal

from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.negatives import MixingKwargs
from solo_ext.methods.registry import METHODS


class MoCHiKwargs(ContrastiveKwargs):
    """``method_kwargs`` of ``mochi``; defaults of the paper's usual (N, s, s') = (1024, 1024, 128).

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
