"""Losses: pure functions, tensors in, scalar out."""

from solo_ext.kernels import MixDraws
from solo_ext.losses.alignment import alignment_loss_func
from solo_ext.losses.arcface import arcface_loss_func
from solo_ext.losses.batch_of_views import batch_of_views
from solo_ext.losses.clip import clip_loss_func
from solo_ext.losses.contrastive_pair import contrastive_loss_func
from solo_ext.losses.core import ContrastiveTerms, contrastive
from solo_ext.losses.cosface import cosface_loss_func
from solo_ext.losses.cpc import bilinear_info_nce_loss_func
from solo_ext.losses.debiased import debiased_loss_func
from solo_ext.losses.hard_negative import hard_negative_loss_func
from solo_ext.losses.info_nce import info_nce_loss_func
from solo_ext.losses.lifted_structured import lifted_structured_loss_func
from solo_ext.losses.mixing import Mixing, draw_mixes
from solo_ext.losses.mochi import mochi_loss_func
from solo_ext.losses.n_pair import n_pair_loss_func
from solo_ext.losses.nce import nce_loss_func
from solo_ext.losses.negative_mass import NegativeEstimator
from solo_ext.losses.nnclr_symmetric import nnclr_symmetric_loss_func
from solo_ext.losses.nt_xent import nt_xent_loss_func
from solo_ext.losses.proto_nce import proto_nce_loss_func
from solo_ext.losses.protocpc import protocpc_loss_func
from solo_ext.losses.protocpc_step import ProtoCPCTerms, protocpc_step
from solo_ext.losses.registry import LOSSES
from solo_ext.losses.seed import SEEDTerms, seed_loss_func, seed_terms
from solo_ext.losses.soft_nearest_neighbor import soft_nearest_neighbor_loss_func
from solo_ext.losses.sphereface import sphereface_loss_func
from solo_ext.losses.triplet import triplet_loss_func
from solo_ext.losses.uniformity import uniformity_loss_func

__all__ = [
    "LOSSES",
    "ContrastiveTerms",
    "MixDraws",
    "Mixing",
    "NegativeEstimator",
    "ProtoCPCTerms",
    "SEEDTerms",
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
