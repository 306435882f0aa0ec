"""Losses: pure functions, tensors in, scalar out, one file for each family of papers.

If a fused kernel computes a loss, the file begins with the formula in a plain form
(``plain_...``), which tests compare the kernel with; otherwise the loss function itself is the
formula. Start with ``info_nce`` (a queue, and PCL's prototypes), then ``contrastive`` (batches,
debiased and hard negatives), which ``mochi`` and ``nnclr`` build on. ``protocpc`` and ``seed`` are
for distillation. ``nce`` (and CLIP), ``metric``, ``margin`` and ``alignment`` hold the classical
losses. Every loss is registered in ``LOSSES``.

All losses compute in fp32 (fp64 for fp64 input), also under autocast, never wait for the device,
and compile to one graph. If there is no negative or no positive, the loss is a zero that can still
be differentiated. Wrong shapes and settings out of range raise ValueError.
"""

from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.alignment import alignment_loss_func, uniformity_loss_func
from solo_ext.losses.common import LOSSES
from solo_ext.losses.contrastive import (
    Mixing,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    debiased_loss_func,
    hard_negative_loss_func,
    nt_xent_loss_func,
)
from solo_ext.losses.info_nce import info_nce_loss_func, proto_nce_loss_func
from solo_ext.losses.margin import arcface_loss_func, cosface_loss_func, sphereface_loss_func
from solo_ext.losses.metric import (
    contrastive_loss_func,
    lifted_structured_loss_func,
    n_pair_loss_func,
    soft_nearest_neighbor_loss_func,
    triplet_loss_func,
)
from solo_ext.losses.mochi import draw_mixes, mochi_loss_func
from solo_ext.losses.nce import bilinear_info_nce_loss_func, clip_loss_func, nce_loss_func
from solo_ext.losses.nnclr import nnclr_symmetric_loss_func
from solo_ext.losses.protocpc import protocpc_loss_func, protocpc_step
from solo_ext.losses.seed import seed_loss_func, seed_terms

__all__ = [
    "LOSSES",
    "MixDraws",
    "Mixing",
    "NegativeEstimator",
    "alignment_loss_func",
    "arcface_loss_func",
    "batch_of_views",
    "bilinear_info_nce_loss_func",
    "clip_loss_func",
    "contrastive",
    "contrastive_loss_func",
    "cosface_loss_func",
    "debiased_loss_func",
    "draw_mixes",
    "hard_negative_loss_func",
    "info_nce_loss_func",
    "lifted_structured_loss_func",
    "mochi_loss_func",
    "n_pair_loss_func",
    "nce_loss_func",
    "nnclr_symmetric_loss_func",
    "nt_xent_loss_func",
    "proto_nce_loss_func",
    "protocpc_loss_func",
    "protocpc_step",
    "seed_loss_func",
    "seed_terms",
    "soft_nearest_neighbor_loss_func",
    "sphereface_loss_func",
    "triplet_loss_func",
    "uniformity_loss_func",
]
