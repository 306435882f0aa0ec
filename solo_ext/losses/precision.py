"""The precision that losses compute in."""

from __future__ import annotations

import torch
from torch import Tensor

from solo_ext.precision import full_precision_products

__all__ = ["full_precision", "full_precision_products"]


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32, or all in fp64 where the first is."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)
