"""The precision that losses compute in, and that of fp32 matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["highest", "high", "medium"]
"""Values as in ``torch.set_float32_matmul_precision``."""

_CPU = {"highest": "ieee", "high": "tf32", "medium": "bf16"}
_CUDA = {"highest": "ieee", "high": "tf32", "medium": "tf32"}


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Sets the precision of fp32 matrix products; restores the old one, also after an error.

    Args:
        precision: "highest": fp32; "high": TF32 if the hardware has it; "medium": TF32 on CUDA; on
            a CPU oneDNN, which may multiply in bf16 if the CPU supports it. Without AMX oneDNN
            stays with fp32, but is up to twice as fast as the library behind "highest". fp64
            products are not affected.
    """
    if not hasattr(torch.backends.mkldnn, "matmul"):
        # torch before 2.9 has a single setting for all devices.
        whole = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(whole)
        return
    # Set each device by itself: reading the single setting fails if a user has set these.
    cpu, cuda = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = cpu.fp32_precision, cuda.fp32_precision
    try:
        cpu.fp32_precision, cuda.fp32_precision = _CPU[precision], _CUDA[precision]
        yield
    finally:
        cpu.fp32_precision, cuda.fp32_precision = before


@contextmanager
def full_precision_products(device: torch.device) -> Iterator[None]:
    """Switches off autocast and products of lower precision than fp32 inside the block."""
    with matmul_precision("highest"):
        # Devices without autocast, such as meta, refuse even to have it switched off.
        if not torch.amp.is_autocast_available(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32, or all in fp64 if the first one is."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)
