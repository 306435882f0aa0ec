"""Random numbers that are a function of whole numbers: seed, epoch, rank, batch."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """A 63-bit seed from several numbers (SplitMix64).

    Of it torch's generator on the CPU uses the lower 32 bits alone: two sets of numbers in 4
    billion draw alike there.

    Example:
        >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
        (True, False)
    """
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def draw(shape: tuple[int, ...], *seeds: int, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1) from several seeds alone, drawn on the device.

    Example:
        >>> draw((2, 3), 0, 7, device=torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    if device.type == "meta":
        return torch.empty(shape, device=device)
    return torch.rand(
        shape, generator=torch.Generator(device).manual_seed(mix(*seeds)), device=device
    )
