"""Hard negative mixing for contrastive learning."""

from __future__ import annotations

from typing import Literal

from solo_ext.config.types import method_kwargs
from solo_ext.methods.contrastive import Contrastive
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs, MixingKwargs
from solo_ext.methods.registry import METHODS


@method_kwargs
class MoCHiKwargs(ContrastiveKwargs):
    """``method_kwargs`` of :class:`MoCHi`; defaults of the paper's usual (1024, 1024, 128)."""

    proj_batch_norm: bool = False
    negatives: Literal["batch", "queue"] = "queue"
    mixing: MixingKwargs = MixingKwargs(num_pair_mixes=1024, num_query_mixes=128)


@METHODS.register(
    "mochi",
    paper="Hard Negative Mixing for Contrastive Learning",
    year=2020,
    arxiv="2010.01028",
)
class MoCHi(Contrastive):
    """MoCo v2 with mixtures of its hardest negatives (Kalantidis et al., 2020, arXiv 2010.01028).

    Each direction mines the queue of its own key, after ``mixing.warmup_epochs``.
    """

    kwargs_type = MoCHiKwargs
