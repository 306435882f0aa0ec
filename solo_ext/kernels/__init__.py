"""Fused operations that losses share."""

from solo_ext.kernels.table_logsumexp import table_logsumexp

__all__ = ["table_logsumexp"]
