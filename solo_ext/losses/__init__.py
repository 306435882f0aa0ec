"""Losses: pure functions, tensors in, scalar out, one file for each family of papers.

A file begins with its formula. Where a fused kernel computes the loss, the formula is a plain form
(``plain_...``), which the kernel is tested against, and the function below it decides which of the
two runs; elsewhere the loss itself is the formula. Start with ``info_nce`` (a queue, and PCL's
prototypes), then ``contrastive`` (batches, debiased and hard negatives), which ``mochi`` and
``nnclr`` build on. ``protocpc`` and ``seed`` are for distillation. ``nce`` (and CLIP),
``metric``, ``margin`` and ``alignment`` hold the classical ones. Every loss is registered in
``LOSSES``.

What holds for all: they compute in fp32, or fp64 for fp64 input, also under autocast, wait for no
device, and compile to one graph. Without a negative, or a positive, a loss is zero that carries the
graph. ValueError says which shape does not fit, or which setting is out of range.
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
