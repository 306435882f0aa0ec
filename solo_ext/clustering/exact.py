"""Sums of floating-point numbers that do not depend on the order of the terms."""

from __future__ import annotations

import math

from torch import Tensor

# An fp64 holds every integer up to 2**53; two bits are kept for sums of twice as many terms, which
# occur while rows move from one cluster to another.
_BITS = 51


def exact_scale(largest: float, terms: int) -> float:
    """Power of two that turns numbers into integers whose sums an fp64 holds exactly.

    ``round(x * scale)`` is an integer, and any sum of up to ``2 * terms`` of them stays below
    2**53: the additions round nothing, so neither their order nor the process or the device that
    does them matters. Rounding to the grid costs at most ``terms * largest * 2**-51`` per term,
    which is what the rounding of an ordinary fp64 sum costs too. Floating-point integers rather
    than int64 because ``index_add_`` of int64 is three times slower on a CPU.

    Args:
        largest: Largest absolute value, finite, >= 0.
        terms: Number of terms of the largest sum, >= 0.

    Returns:
        The scale; 1.0 if there is nothing to sum.
    """
    if largest == 0 or terms == 0:
        return 1.0
    exponent = _BITS - math.frexp(largest)[1] - math.frexp(terms)[1]
    return math.ldexp(1.0, max(-1022, min(1023, exponent)))


def on_grid(x: Tensor, scale: float) -> Tensor:
    """Rounds ``x`` to integers of ``1 / scale``, held in fp64.

    Args:
        x: Floating tensor of any shape.
        scale: From :func:`exact_scale`.

    Returns:
        fp64 tensor of the same shape, a copy.
    """
    return x.double().mul(scale).round_()
