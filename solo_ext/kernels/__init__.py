"""Fused operations that losses share."""

from solo_ext.kernels.batch_contrast import batch_contrast
from solo_ext.kernels.mixed_logsumexp import MixDraws, mixed_logsumexp
from solo_ext.kernels.nearest_rows import nearest_rows
from solo_ext.kernels.table_logsumexp import table_logsumexp

__all__ = ["MixDraws", "batch_contrast", "mixed_logsumexp", "nearest_rows", "table_logsumexp"]
