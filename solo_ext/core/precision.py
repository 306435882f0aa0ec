"""The precision of losses and of fp32 matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["highest", "high", "medium"]
"""Values as in ``torch.set_float32_matmul_precision``."""

ComputeDtype = Literal["auto", "float32", "bfloat16"]
"""Dtypes of the factors of a loss's products, as configs name them."""

_CPU = {"highest": "ieee", "high": "tf32", "medium": "bf16"}
_CUDA = {"highest": "ieee", "high": "tf32", "medium": "tf32"}


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Sets the precision of fp32 matrix products inside the block.

    "highest" is fp32, and "high" is TF32 if the hardware has it. "medium" is TF32 on CUDA; on a CPU
    it selects oneDNN, which may multiply in bf16. Without AMX oneDNN stays with fp32, but is up to
    twice as fast as the library behind "highest". Products in fp64 are not affected.

    >>> with matmul_precision("highest"):
    ...     torch.backends.cuda.matmul.fp32_precision
    'ieee'
    """
    if torch.compiler.is_compiling():
        # torch.compile cannot read these settings while it traces a graph.
        yield
        return
    # Set each device separately: reading the global setting fails if a user has set these.
    cpu: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    cuda = torch.backends.cuda.matmul
    before = cpu.fp32_precision, cuda.fp32_precision
    try:
        cpu.fp32_precision, cuda.fp32_precision = _CPU[precision], _CUDA[precision]
        yield
    finally:
        cpu.fp32_precision, cuda.fp32_precision = before


@contextmanager
def full_precision_products(device: torch.device, or_tf32: bool = False) -> Iterator[None]:
    """Switches off autocast and products of lower precision than fp32 inside the block.

    With ``or_tf32``, products under autocast on a GPU are in TF32: its mantissa is that of float16,
    three bits more than that of bfloat16, and its range is that of fp32.

    >>> x = torch.ones(2, 3)
    >>> with torch.autocast("cpu", torch.bfloat16), full_precision_products(x.device):
    ...     (x @ x.T).dtype
    torch.float32
    """
    narrow = or_tf32 and device.type == "cuda" and torch.is_autocast_enabled("cuda")
    with matmul_precision("high" if narrow else "highest"):
        # On devices without autocast, such as meta, torch refuses even to switch it off.
        if not torch.amp.is_autocast_available(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts all tensors to fp32, or to fp64 if the first one is fp64.

    >>> [x.dtype for x in full_precision(torch.ones(2).half(), torch.ones(2).double())]
    [torch.float32, torch.float32]
    """
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)


def factors_dtype(setting: ComputeDtype, device: torch.device) -> torch.dtype | None:
    """Dtype of the factors of a loss's products; ``None`` for the loss's own dtype, fp32.

    "auto" is bfloat16 under autocast to it on a GPU, else fp32: the range of float16 is too small
    for exponentials.

    >>> cpu = torch.device("cpu")
    >>> factors_dtype("bfloat16", cpu), factors_dtype("auto", cpu)
    (torch.bfloat16, None)
    """
    if setting == "auto" and device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        setting = "bfloat16" if torch.get_autocast_dtype("cuda") == torch.bfloat16 else "float32"
    return torch.bfloat16 if setting == "bfloat16" else None
