"""Losses: pure functions, tensors in, scalar out."""

from solo_ext.losses.debiased import debiased_loss_func
from solo_ext.losses.info_nce import info_nce_loss_func
from solo_ext.losses.nt_xent import nt_xent_loss_func
from solo_ext.losses.proto_nce import proto_nce_loss_func
from solo_ext.losses.registry import LOSSES

__all__ = [
    "LOSSES",
    "debiased_loss_func",
    "info_nce_loss_func",
    "nt_xent_loss_func",
    "proto_nce_loss_func",
]
