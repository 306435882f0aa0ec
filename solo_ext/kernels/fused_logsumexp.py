"""Log-sum-exps over a constant table, and means of its rows, as one Triton kernel for GPUs.

The arithmetic is that of attention with the table as keys and as values: each program keeps a
block of queries and goes through its share of the table with a running maximum; a second kernel
joins the shares. This file can only be imported if Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_JOINED = 16
"""Number of shares that the second kernel reads at a time."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """Matrix product with fp32 sums; fp32 factors use three TF32 products to keep fp32 accuracy."""
    if _INTERPRETED:
        # The interpreter would multiply the bits of bf16 numbers as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _sweep(
    query,
    table,
    columns,
    log_weight,
    scale,
    lse,
    largest,
    mean,
    N,
    K,
    D,
    span,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FACTORS: tl.constexpr,
    WITH_MEAN: tl.constexpr,
):
    """Sums over share ``program_id(1)`` of the table, for block ``program_id(0)`` of queries."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < N) & (dims[None, :] < D)
    q = tl.load(query + rows[:, None] * D + dims[None, :], mask=inside, other=0.0)
    q = (q * scale).to(FACTORS)
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    unweighted = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, K), BLOCK_K):
        places = start + tl.arange(0, BLOCK_K)
        there = places < K
        ids = places.to(tl.int64)
        if columns is not None:
            ids = tl.load(columns + places, mask=there, other=0)
        t = tl.load(
            table + ids[:, None] * D + dims[None, :],
            mask=there[:, None] & (dims[None, :] < D),
            other=0.0,
        )
        t = t.to(FACTORS)
        logits = tl.where(there[None, :], dot(q, tl.trans(t)), float("-inf"))
        if log_weight is not None:
            unweighted = tl.maximum(unweighted, tl.max(logits, 1))
            logits += tl.load(log_weight + places, mask=there, other=0.0)[None, :]
        grown = tl.maximum(top, tl.max(logits, 1))
        # If no row has weight yet, the maximum is -inf: -inf - (-inf) would be NaN.
        shift = tl.where(grown == float("-inf"), 0.0, grown)
        decay = tl.exp(top - shift)
        weights = tl.exp(logits - shift[:, None])
        total = total * decay + tl.sum(weights, 1)
        if WITH_MEAN:
            sums = sums * decay[:, None] + dot(weights.to(FACTORS), t)
        top = grown
    out = tl.program_id(1) * N + rows
    # If no row has weight, the maximum and the log-sum-exp are -inf, and the mean is 0.
    total = tl.where(total == 0, 1.0, total)
    tl.store(lse + out, top + tl.log(total), mask=rows < N)
    tl.store(largest + out, top if log_weight is None else unweighted, mask=rows < N)
    if WITH_MEAN:
        tl.store(mean + out[:, None] * D + dims[None, :], sums / total[:, None], mask=inside)


@triton.jit
def _join(
    lses,
    tops,
    means,
    lse,
    largest,
    mean,
    N,
    D,
    shares,
    SHARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_MEAN: tl.constexpr,
):
    """Joins the sums of query ``program_id(0)`` over all shares of the table."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SHARES)
    found = tl.load(lses + every * N + row, mask=every < shares, other=float("-inf"))
    raw = tl.load(tops + every * N + row, mask=every < shares, other=float("-inf"))
    top = tl.max(found, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(found - shift), 0)
    joined = shift + tl.log(tl.where(total == 0, 1.0, total))
    tl.store(lse + row, tl.where(total == 0, top, joined))
    tl.store(largest + row, tl.max(raw, 0))
    if WITH_MEAN:
        dims = tl.arange(0, BLOCK_D)
        sums = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, shares, BLOCK_S):
            some = start + tl.arange(0, BLOCK_S)
            held = tl.load(lses + some * N + row, mask=some < shares, other=float("-inf"))
            weights = tl.exp(held - joined)
            part = tl.load(
                means + (some[:, None] * N + row) * D + dims[None, :],
                mask=(some[:, None] < shares) & (dims[None, :] < D),
                other=0.0,
            )
            sums += tl.sum(part * weights[:, None], 0)
        tl.store(mean + row * D + dims, sums, mask=dims < D)


@torch.library.custom_op("solo_ext::fused_logsumexp", mutates_args=())
def fused_logsumexp(
    query: Tensor,
    table: Tensor,
    scale: float,
    columns: Tensor | None,
    log_weight: Tensor | None,
    factors: torch.dtype,
    with_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`solo_ext.kernels.tables.table_logsumexp` for one power.

    The kernel reads the table in its own dtype and converts it to the dtype of the factors on the
    fly, without a copy. The order of all sums is fixed, so results are deterministic.

    Args:
        query: (N, D), fp32, D at most :data:`solo_ext.kernels.dispatch.WIDEST`.
        table: (K, D), of any floating dtype but fp64.
        scale: factor of all similarities.
        columns: (C,) indices of the rows of the table that are summed; all by default.
        log_weight: (C,) log w.
        factors: dtype of the factors of products; sums and exponentials are fp32.
        with_mean: whether to compute the means.

    Returns:
        Log-sum-exps (N,), largest similarities (N,), and the means ``sum_j softmax_ij t_j`` (N, D)
        or an empty tensor.
    """
    query, table = query.contiguous(), table.contiguous()
    columns, log_weight = (None if x is None else x.contiguous() for x in (columns, log_weight))
    (count, width), size = query.shape, len(table if columns is None else columns)
    block_d, wide = max(triton.next_power_of_2(width), 16), width > 128
    large = large_blocks(query.device)
    block_n, block_k, warps, stages, programs = sweep_sizes(factors, wide, large)
    block_n = min(max(triton.next_power_of_2(count), 16), block_n)
    blocks = triton.cdiv(count, block_n)
    # Programs for each multiprocessor, of all blocks of queries together.
    wanted = max(programs * processors(query.device) // blocks, 1)
    span = triton.cdiv(triton.cdiv(max(size, 1), wanted), block_k) * block_k
    shares = triton.cdiv(max(size, 1), span)
    lses, tops = query.new_empty(shares, count), query.new_empty(shares, count)
    means = query.new_empty((shares, count, width) if with_mean else (0,))
    _sweep[blocks, shares](
        *(query, table, columns, log_weight, scale, lses, tops, means),
        *(count, size, width, span, block_n, block_k, block_d, _TYPES[factors], with_mean),
        num_warps=warps,
        num_stages=stages,
    )
    lse, largest = torch.empty_like(lses[0]), torch.empty_like(lses[0])
    mean = query.new_empty((count, width) if with_mean else (0,))
    _join[(count,)](
        *(lses, tops, means, lse, largest, mean, count, width, shares),
        *(triton.next_power_of_2(shares), _JOINED, block_d, with_mean),
        num_warps=1,
    )
    return lse, largest, mean


@fused_logsumexp.register_fake
def _(query: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    empty = query.new_empty(len(query))
    return empty, empty.clone(), query.new_empty(query.shape if settings[-1] else (0,))


@register_flop_formula(torch.ops.solo_ext.fused_logsumexp)
def _flops(query: Any, table: Any, *settings: Any, **_: Any) -> Any:
    columns, with_mean = settings[1], settings[-1]
    return 2 * (1 + with_mean) * query[0] * query[1] * (table if columns is None else columns)[0]


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def sweep_sizes(factors: torch.dtype, wide: bool, large: bool) -> tuple[int, int, int, int, int]:
    """How ``_sweep`` is launched, for D above 128 (``wide``) and large blocks or not.

    The fastest of those tried on an H200 with 65,536 rows, but for the two wide ones of smaller
    blocks: fp32 factors, split in three, need more registers, and consumer GPUs have less memory.

    Returns:
        Rows of the query and of the table in a block, warps, stages, and the number of programs for
        each multiprocessor.
    """
    if factors == torch.float32:
        return (16, 32, 8, 2, 2) if wide else (64, 32, 4, 2, 2)
    if wide:
        return (128, 64, 8, 2, 1) if large else (64, 32, 8, 2, 2)
    return 64, 64, 4, 3, 2


def large_blocks(device: torch.device) -> bool:
    """Whether a program may take 160 KiB of shared memory: A100 and H100; an RTX 4090 has 99."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024


def processors(device: torch.device) -> int:
    """Number of multiprocessors of a device."""
    if device.type != "cuda":
        return 4  # under the interpreter: enough for several shares
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
