"""The precision that losses compute in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off inside the block, on devices that have it."""
    # Devices without autocast, meta among them, refuse even to have it switched off.
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32, or all in fp64 where the first is."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)
