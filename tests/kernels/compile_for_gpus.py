"""Compiles the Triton kernels for GPUs that need not be there: A100, RTX 3090 and H100.

Triton's interpreter runs Python: it accepts what the compiler refuses, such as a variable that
changes its shape within a loop. Prints a line for each kernel that was compiled, to the code that
the first argument names: ``ptx``, or the machine code ``cubin``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from solo_ext.data import fused_crops
from solo_ext.kernels import fused_logsumexp, fused_nearest

MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Shared memory of a block, by compute capability."""
NUMBERS = ("N", "K", "D", "blocks", "span", "shares")
SIDES = ("H", "W", "S", "resized_h", "resized_w", "first_h", "first_w")
SCALARS = {**dict.fromkeys((*NUMBERS, *SIDES), "i32"), "scale": "fp32"}
IDS = {"query_ids": "*i64", "table_ids": "*i64"}
WEIGHTS = {"columns": "*i64", "log_weight": "*fp32"}
OPTIONAL = {**IDS, **WEIGHTS}


if sys.argv[1] == "ptx":
    CUDABackend.make_cubin = lambda *_: b""


def build(
    kernel: Any,
    capability: int,
    given: dict[str, str],
    warps: int = 8,
    stages: int = 2,
    **blocks: Any,
) -> None:
    """Compiles one kernel; optional inputs that are not given are ``None``, all others fp32."""
    signature, constants = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in blocks or (name in OPTIONAL and name not in given):
            signature[name], constants[(place,)] = "constexpr", blocks.get(name)
        else:
            signature[name] = given.get(name) or SCALARS.get(name, "*fp32")
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=target, options=options)
    assert built.metadata.shared <= MEMORY[capability], (kernel, blocks, built.metadata.shared)
    print(kernel.__name__, capability, built.metadata.shared, sorted(given), blocks)


for capability, memory in MEMORY.items():
    large = memory >= 160 * 1024
    for factors, dtype in ((tl.bfloat16, torch.bfloat16), (tl.float32, torch.float32)):
        for wide in (False, True):
            block_n, block_k, warps, stages, _ = fused_logsumexp.sweep_sizes(dtype, wide, large)
            blocks = {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_D": 256 if wide else 128}
            sweep = fused_logsumexp._sweep, capability
            build(*sweep, WEIGHTS, warps, stages, **blocks, FACTORS=factors, WITH_MEAN=True)
    bound = {"BLOCK_N": fused_nearest.bound_rows(256, large), "BLOCK_K": 64, "BLOCK_D": 256}
    build(fused_nearest._bound, capability, IDS, **bound)

# These hold next to nothing in shared memory and multiply no matrices: one GPU stands for all.
join = fused_logsumexp._join, 80, {}
build(*join, 1, SHARES=128, BLOCK_S=16, BLOCK_D=128, WITH_MEAN=True)
score = fused_nearest._score, 80, {**IDS, "index": "*i64"}
build(*score, 4, SHARES=64, GROUP=64, BLOCK_K=64, BLOCK_D=256)
for block in (32, 64, 128):
    crop: dict[str, Any] = dict.fromkeys(("BLOCK_H", "BLOCK_S"), block)
    crop |= dict.fromkeys(("JITTER", "SHIFT", "BLUR"), True)
    build(fused_crops._crop, 80, {"images": "*u8"}, fused_crops.warps_of(block), **crop)
