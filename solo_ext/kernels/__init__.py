"""Fused operations that losses share."""

from solo_ext.kernels.batch_contrast import batch_contrast
from solo_ext.kernels.bounded_logsumexp import BOUND, bounded_logsumexp
from solo_ext.kernels.mixed_logsumexp import MixDraws, mixed_logsumexp
from solo_ext.kernels.nearest_rows import nearest_rows
from solo_ext.kernels.prototype_contrast import prototype_contrast
from solo_ext.kernels.sinkhorn import assign
from solo_ext.kernels.table_distillation import table_distillation
from solo_ext.kernels.table_logsumexp import table_logsumexp
from solo_ext.kernels.two_view_contrast import TwoViewContrast, two_view_contrast, two_view_fits

__all__ = [
    "BOUND",
    "MixDraws",
    "TwoViewContrast",
    "assign",
    "batch_contrast",
    "bounded_logsumexp",
    "mixed_logsumexp",
    "nearest_rows",
    "prototype_contrast",
    "table_distillation",
    "table_logsumexp",
    "two_view_contrast",
    "two_view_fits",
]
