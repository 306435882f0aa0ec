"""The precision that losses compute in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from solo_ext.precision import matmul_precision


@contextmanager
def full_precision_products(device: torch.device) -> Iterator[None]:
    """Switches autocast, and products of less than fp32, off inside the block."""
    with matmul_precision("highest"):
        # Devices without autocast, meta among them, refuse even to have it switched off.
        if not torch.amp.is_autocast_available(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32, or all in fp64 where the first is."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)
