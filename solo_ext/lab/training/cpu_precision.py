"""``precision: auto``: bfloat16 on CPUs that are faster with it and convolve correctly in it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.config.schema import RunConfig
from solo_ext.core.errors import ConfigError

logger = logging.getLogger(__name__)
Convolutions = list[tuple[nn.Conv2d, tuple[int, ...]]]
"""Layers, each with the shape (C, H, W) of an input that it receives."""
BATCH, TRIALS, TOLERANCE = 16, 3, 0.02
"""Images, repetitions, and the relative error that makes a convolution wrong; rounding: 0.004."""


def precision_for(run: RunConfig, convolutions: Convolutions) -> str:
    """``bf16-mixed`` if it is faster and correct on this processor, else ``32-true``.

    It is faster on processors with AVX512-BF16 or AMX (measured on the former). The choice uses no
    timing, so that a run can be repeated.

    Args:
        run: the config; a run that is not on the CPU keeps ``32-true``.
        convolutions: the convolutions of its backbone.

    >>> run = RunConfig.model_construct(accelerator="gpu")
    >>> precision_for(run, [(nn.Conv2d(3, 8, 3), (3, 32, 32))])
    '32-true'
    """
    if not run.on_cpu or not multiplies_bfloat16():
        return "32-true"
    last = not run.performance.disable_channel_last
    geometries = {(str(layer), shape): layer for layer, shape in convolutions}
    for (name, shape), layer in geometries.items():
        if not is_correct_in_bf16(layer, shape, last):
            logger.info(
                f"precision: 32-true, because in bfloat16 torch {torch.__version__} computes "
                f"{name} of {shape[1]} x {shape[2]} pixels wrongly on this processor"
            )
            return "32-true"
    return "bf16-mixed"


def refuse_unwritten_gradients(run: RunConfig, convolutions: Convolutions) -> None:
    """Refuses bfloat16 on a CPU for convolutions whose gradients are known to be wrong in it.

    Unlike for ``precision: auto`` nothing is computed. Args as in :func:`precision_for`.

    Raises:
        ConfigError: a convolution with a stride sees maps of one pixel.

    >>> run = RunConfig.model_construct(accelerator="cpu", precision="bf16-mixed")
    >>> refuse_unwritten_gradients(run, [(nn.Conv2d(8, 16, 3, stride=2, padding=1), (8, 2, 2))])
    """
    if not run.on_cpu or not str(run.precision).startswith("bf16"):
        return
    for layer, shape in convolutions:
        if leaves_gradients_unwritten(layer, shape):
            problem = f"a CPU leaves gradients of {layer} unwritten where its input has one pixel"
            raise ConfigError("precision", run.precision, problem, "take 32-true, or larger crops")


def leaves_gradients_unwritten(layer: nn.Conv2d, shape: tuple[int, ...]) -> bool:
    """Whether oneDNN leaves gradients of kernel elements that see only padding uninitialised.

    So it is in torch 2.15. That memory often holds zeros, the correct values, so comparing results
    may miss it.

    >>> leaves_gradients_unwritten(nn.Conv2d(8, 16, 3, stride=2, padding=1), (8, 1, 1))
    True
    """
    return shape[1:] == (1, 1) and layer.stride != (1, 1) and layer.kernel_size != (1, 1)


def multiplies_bfloat16() -> bool:
    """Whether the processor has AVX512-BF16 or AMX; others multiply bfloat16 slower than fp32.

    >>> type(multiplies_bfloat16())
    <class 'bool'>
    """
    # torch 2.10 cannot report what the processor has, so runs keep fp32 there.
    has: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def is_correct_in_bf16(
    layer: nn.Conv2d, shape: tuple[int, ...], channels_last: bool = True
) -> bool:
    """Whether a convolution of inputs (C, H, W) and its gradients are correct in bfloat16.

    They are compared with those in fp32, up to rounding, for random inputs and weights.

    >>> is_correct_in_bf16(nn.Conv2d(8, 16, 3, padding=1), (8, 4, 4))
    True
    >>> is_correct_in_bf16(nn.Conv2d(8, 16, 3, stride=2, padding=1), (8, 1, 1))
    False
    """
    if leaves_gradients_unwritten(layer, shape):
        return False
    form = torch.channels_last if channels_last else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(memory_format=form).requires_grad_()

    def results() -> list[Tensor]:
        y = layer._conv_forward(x, weight, None)
        towards = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        return [y.detach().float(), *torch.autograd.grad(y, (x, weight), towards)]

    x, weight = drawn(BATCH, *shape), drawn(*layer.weight.shape)
    try:
        exact = results()
    except RuntimeError:
        # A layer that pads its own input fails here; it cannot be checked, so it counts as wrong.
        return False
    dtypes = torch.float32, torch.bfloat16
    for _ in range(TRIALS):
        # Fill the memory that the next results reuse with NaN, so that a kernel that leaves a part
        # of its result uninitialised is noticed.
        spoilt = [torch.full_like(t, float("nan"), dtype=d) for t in exact for d in dtypes]
        del spoilt
        with torch.autocast("cpu", torch.bfloat16):
            found = results()
        for one, other in zip(found, exact, strict=True):
            # Written with `not`, because every comparison with NaN is false.
            if not (one - other).norm() <= TOLERANCE * other.norm():
                return False
    return True
