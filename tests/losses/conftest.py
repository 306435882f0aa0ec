"""What the tests of several losses share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def same(
    found: Tensor,
    expected: Tensor,
    inputs: Tensor | Sequence[Tensor],
    *,
    values: tuple[float, float],
    slopes: tuple[float, float],
) -> None:
    """Compares values and gradients, each to a relative and an absolute tolerance."""
    torch.testing.assert_close(found, expected, rtol=values[0], atol=values[1])
    ours, theirs = (torch.autograd.grad(x, inputs) for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=slopes[0], atol=slopes[1])
