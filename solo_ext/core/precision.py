"""The precision that losses compute in, and that of fp32 matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["highest", "high", "medium"]
"""Values as in ``torch.set_float32_matmul_precision``."""

ComputeDtype = Literal["auto", "float32", "bfloat16"]
"""Dtypes of the factors of a loss's products, as configs give them."""

_CPU = {"highest": "ieee", "high": "tf32", "medium": "bf16"}
_CUDA = {"highest": "ieee", "high": "tf32", "medium": "tf32"}


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Sets the precision of fp32 matrix products inside the block.

    "highest" is fp32, "high" is TF32 if the hardware has it, "medium" is TF32 on CUDA and on a CPU
    oneDNN, which may multiply in bf16. A CPU without AMX stays with fp32 there, but oneDNN is up to
    twice as fast as the library behind "highest". Products in fp64 are not affected.

    >>> with matmul_precision("highest"):
    ...     torch.backends.cuda.matmul.fp32_precision
    'ieee'
    """
    if torch.compiler.is_compiling():
        # These settings cannot be read while a graph is traced.
        yield
        return
    # Set each device by itself: reading the single setting fails if a user has set these.
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

    With ``or_tf32`` TF32 will do under autocast on a GPU: it has float16's digits, three bits more
    than bfloat16, and the range of fp32.

    >>> x = torch.ones(2, 3)
    >>> with torch.autocast("cpu", torch.bfloat16), full_precision_products(x.device):
    ...     (x @ x.T).dtype
    torch.float32
    """
    narrow = or_tf32 and device.type == "cuda" and torch.is_autocast_enabled("cuda")
    with matmul_precision("high" if narrow else "highest"):
        # Devices without autocast, such as meta, refuse even to have it switched off.
        if not torch.amp.is_autocast_available(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield


def full_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32, or all in fp64 if the first one is.

    >>> [x.dtype for x in full_precision(torch.ones(2).half(), torch.ones(2).double())]
    [torch.float32, torch.float32]
    """
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return tuple(t.to(dtype) for t in tensors)


def factors_dtype(setting: ComputeDtype, device: torch.device) -> torch.dtype | None:
    """Dtype of the factors of a loss's products; ``None`` for that of the loss, fp32.

    "auto" is that of autocast on a GPU, but fp32 under autocast to float16, whose range is too
    small for exponentials, and on a CPU.

    >>> cpu = torch.device("cpu")
    >>> factors_dtype("bfloat16", cpu), factors_dtype("auto", cpu)
    (torch.bfloat16, None)
    """
    if setting == "auto" and device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        setting = "bfloat16" if torch.get_autocast_dtype("cuda") == torch.bfloat16 else "float32"
    return torch.bfloat16 if setting == "bfloat16" else None
