"""Cosines with rows that are as large as memory, and are not copied."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_ELEMENTS = 2**24
_SMALLEST_NORM = 1e-12


def cosines(queries: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """Cosine similarities in fp32, under autocast too; rows of zeros have cosine 0.

    Args:
        queries: (B, D), of any norm and floating dtype.
        rows: (m, D), likewise; half precision is cast by parts.
        scale: (m,) of :func:`inverse_norms` of ``rows``.

    Returns:
        (B, m).
    """
    similarity = queries.new_empty(len(queries), len(rows), dtype=torch.float32)
    queries = F.normalize(queries.float(), dim=-1)
    # In half precision a cosine is off by about 1e-3, which T = 0.01 would turn into 10 %.
    with torch.autocast(queries.device.type, enabled=False):
        for start, part in _parts(rows):
            torch.mm(queries, part.T, out=similarity[:, start : start + len(part)])
    return similarity.mul_(scale)


def inverse_norms(rows: Tensor) -> Tensor:
    """(m,) reciprocal lengths of rows (m, D), in fp32."""
    norms = [torch.linalg.vector_norm(part, dim=-1) for _, part in _parts(rows)]
    joined = torch.cat(norms) if norms else rows.new_empty(0, dtype=torch.float32)
    return joined.clamp_min(_SMALLEST_NORM).reciprocal()


def _parts(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The rows in fp32, by parts where that takes a copy."""
    size = len(rows) if rows.dtype == torch.float32 else _MAX_ELEMENTS // rows.shape[-1]
    for start in range(0, len(rows), max(1, size)):
        yield start, rows[start : start + max(1, size)].float()
