"""What operations are timed on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.speed.effort import Effort


def unit(effort: Effort, rows: int, dim: int) -> Tensor:
    """Random unit rows."""
    return F.normalize(torch.randn(rows, dim, device=effort.device), dim=1)


def across(gradient: Tensor, rows: Tensor) -> Tensor:
    """The gradient across the sphere: many forms do not normalise inside."""
    rows = rows.detach()
    return gradient - (gradient * rows).sum(1, keepdim=True) * rows


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())
