"""The row of a constant table most similar to each query, as two Triton kernels for GPUs.

The first multiplies in bf16 and keeps, for each query and block of rows, only an upper bound of the
similarities; the second scores in fp32 the blocks whose bound reaches the best lower bound. For a
similarity ``q.t`` and the product of the rounded rows ``q'.t'``, the Cauchy-Schwarz inequality
gives ``|q.t - q'.t'| <= |q'| |t - t'| + |q - q'| |t|``; fp32 sums add at most ``D 2^-22 |q| |t|``.
So the block of the most similar row is never skipped: the result is that of fp32, for all rows
whose squared length does not underflow (1e-22 and longer).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from solo_ext.kernels.fused_logsumexp import dot, large_blocks, processors

_BLOCK = 64
"""Rows per bound; the bounds take 1/64 of the memory of all similarities."""
_GROUP = 64
"""Number of blocks that one program of the second kernel checks."""
_SLACK = tl.constexpr(2.0**-22)


@triton.jit
def _bound(
    query,
    table,
    query_ids,
    table_ids,
    upper,
    lower,
    N,
    K,
    D,
    blocks,
    span,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Upper bounds (N, blocks), and the best lower bound in each share of the table."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(
        query + rows[:, None] * D + dims[None, :],
        mask=(rows[:, None] < N) & (dims[None, :] < D),
        other=0.0,
    )
    narrow = q.to(tl.bfloat16)
    rest = q - narrow.to(tl.float32)
    length, lost = tl.sqrt(tl.sum(q * q, 1)), tl.sqrt(tl.sum(rest * rest, 1))
    if query_ids is not None:
        own = tl.load(query_ids + rows, mask=rows < N, other=0)
    best = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    begin = tl.program_id(1) * span
    for block in range(begin, tl.minimum(begin + span, blocks)):
        places = (block * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
        there = places < K
        t = tl.load(
            table + places[:, None] * D + dims[None, :],
            mask=there[:, None] & (dims[None, :] < D),
            other=0.0,
        ).to(tl.float32)
        rounded = t.to(tl.bfloat16)
        cut = t - rounded.to(tl.float32)
        longest, missed = tl.max(tl.sum(t * t, 1), 0), tl.max(tl.sum(cut * cut, 1), 0)
        error = (length + lost) * tl.sqrt(missed) + lost * tl.sqrt(longest)
        error += _SLACK * D * length * tl.sqrt(longest)
        similar = tl.where(there[None, :], dot(narrow, tl.trans(rounded)), float("-inf"))
        if query_ids is not None:
            ids = tl.load(table_ids + places, mask=there, other=0)
            similar = tl.where(own[:, None] == ids[None, :], float("-inf"), similar)
        largest = tl.max(similar, 1)
        tl.store(upper + rows.to(tl.int64) * blocks + block, largest + error, mask=rows < N)
        best = tl.maximum(best, largest - error)
    tl.store(lower + tl.program_id(1) * N + rows, best, mask=rows < N)


@triton.jit
def _score(
    query,
    table,
    query_ids,
    table_ids,
    upper,
    lower,
    value,
    index,
    N,
    K,
    D,
    blocks,
    shares,
    SHARES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Finds the row most similar to query ``program_id(0)`` in block group ``program_id(1)``."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    every, held = tl.arange(0, SHARES), group * GROUP + tl.arange(0, GROUP)
    least = tl.max(tl.load(lower + every * N + row, mask=every < shares, other=float("-inf")), 0)
    bounds = tl.load(upper + row * blocks + held, mask=held < blocks, other=float("-inf"))
    open_blocks = (bounds >= least) & (bounds > float("-inf"))
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(query + row * D + dims, mask=dims < D, other=0.0)
    best, place = float("-inf"), tl.zeros((), tl.int64)
    # Few blocks are open; a loop over all would take longer than their scores.
    for _ in range(tl.sum(open_blocks.to(tl.int32), 0)):
        i = tl.min(tl.where(open_blocks, tl.arange(0, GROUP), GROUP), 0)
        open_blocks = open_blocks & (tl.arange(0, GROUP) != i)
        places = ((group * GROUP + i) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
        there = places < K
        t = tl.load(
            table + places[:, None] * D + dims[None, :],
            mask=there[:, None] & (dims[None, :] < D),
            other=0.0,
        ).to(tl.float32)
        similar = tl.where(there, tl.sum(t * q[None, :], 1), float("-inf"))
        if query_ids is not None:
            ids = tl.load(table_ids + places, mask=there, other=0)
            similar = tl.where(ids == tl.load(query_ids + row), float("-inf"), similar)
        top = tl.max(similar, 0)
        if top > best:
            best = top
            place = tl.min(tl.where(similar == top, places, K), 0)
    out = row * tl.num_programs(1) + group
    # If the query is not finite, this makes the similarity NaN: there is no nearest row.
    tl.store(value + out, best + tl.sum(q * 0.0, 0))
    tl.store(index + out, place)


def bound_rows(width: int, large: bool) -> int:
    """Rows of the query in a block of ``_bound``, which must fit the GPU's shared memory."""
    return 128 if width <= 128 or large else 64


@torch.library.custom_op("solo_ext::fused_nearest", mutates_args=())
def fused_nearest(
    query: Tensor, table: Tensor, query_ids: Tensor | None, table_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Index (N, 1) and similarity (N, 1) of :func:`solo_ext.kernels.nearest_rows.nearest_rows`.

    Args:
        query: (N, D), fp32, D at most :data:`solo_ext.kernels.dispatch.WIDEST`.
        table: (K, D), of any floating dtype but fp64, K above 0.
        query_ids: (N,) integers, or ``None``.
        table_ids: (K,) integers, or ``None`` if ``query_ids`` is.
    """
    query, table = query.contiguous(), table.contiguous()
    query_ids, table_ids = (None if x is None else x.contiguous() for x in (query_ids, table_ids))
    (count, width), size = query.shape, len(table)
    block_d = max(triton.next_power_of_2(width), 16)
    block_n = min(
        max(triton.next_power_of_2(count), 16), bound_rows(width, large_blocks(query.device))
    )
    blocks, parts = triton.cdiv(size, _BLOCK), triton.cdiv(count, block_n)
    # One program for each multiprocessor; on an H200 more are no faster.
    span = triton.cdiv(blocks, max(processors(query.device) // parts, 1))
    shares, groups = triton.cdiv(blocks, span), triton.cdiv(blocks, _GROUP)
    upper, lower = query.new_empty(count, blocks), query.new_empty(shares, count)
    value = query.new_empty(count, groups)
    index = torch.empty_like(value, dtype=torch.long)
    given = query, table, query_ids, table_ids, upper, lower
    sizes = count, size, width, blocks
    _bound[parts, shares](*given, *sizes, span, block_n, _BLOCK, block_d, num_warps=8, num_stages=2)
    _score[count, groups](
        *given,
        *(value, index, *sizes, shares),
        *(triton.next_power_of_2(shares), _GROUP, _BLOCK, block_d),
        num_warps=4,
    )
    best, group = value.max(1, keepdim=True)
    return index.gather(1, group), best


@fused_nearest.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    value = query.new_empty(len(query), 1)
    return torch.empty_like(value, dtype=torch.long), value


@register_flop_formula(torch.ops.solo_ext.fused_nearest)
def _flops(query: Any, table: Any, *_: Any, **__: Any) -> Any:
    return 2 * query[0] * query[1] * table[0]
