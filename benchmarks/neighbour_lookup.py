"""Nearest neighbours in a support set: ours, solo-learn's, lightly's, the plain form compiled.

    python benchmarks/neighbour_lookup.py [--json FILE]        # lightly's own where installed

Index and embedding of the nearest row of each query, on one thread, all variants in turn, eleven
rounds after ten to warm up; the ratio is that of the median round to ours of the same round,
`again` is ours a second time (what equals differ by). solo-learn's is the look-up of its NNCLR.
Without lightly the same operations are written out: clone the bank, normalise it, multiply,
argmax, select. `rows` is the share of queries for which the same row is found as by ours. Memory
is the largest sum of live allocations beyond the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from interleaved import Record, peak_mib, race, show
from torch import Tensor

from solo_ext import host
from solo_ext.kernels.nearest_rows import nearest_rows

try:
    from lightly.models.modules import NNMemoryBankModule
except ImportError:
    NNMemoryBankModule = None

ROUNDS = 11
SIZES = [(512, 98304, 256), (256, 65536, 128), (256, 16384, 128)]
IMAGES = 50_000
"""Ids are drawn from as many."""

Lookup = Callable[[], Tensor]
"""Embeddings (N, k, D), or (N, D) for the nearest alone."""


def unit(rows: int, dim: int) -> Tensor:
    """Random unit rows."""
    return F.normalize(torch.randn(rows, dim), dim=1)


def ours(query: Tensor, table: Tensor, k: int = 1, **ids: Tensor) -> Tensor:
    """What a support set does."""
    return table[nearest_rows(query, table, k, **ids).index]


def plain(query: Tensor, table: Tensor) -> Tensor:
    """The formula, as a (N, K) matrix of similarities."""
    return table[(query @ table.T).max(dim=1)[1]]


def plain_without_own(query: Tensor, table: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """The formula without the rows of the query's own image."""
    similarity = query @ table.T
    similarity.masked_fill_(own.unsqueeze(1) == ids, float("-inf"))
    return table[similarity.max(dim=1)[1]]


def written_out(query: Tensor, bank: Tensor) -> Tensor:
    """The operations of lightly's bank."""
    copy = bank.clone()
    similarity = F.normalize(query, dim=1) @ F.normalize(copy, dim=1).T
    return copy.index_select(0, similarity.argmax(dim=1))


def lightlys(query: Tensor, table: Tensor) -> Lookup:
    """lightly's bank holding the table."""
    if NNMemoryBankModule is None:
        return lambda: written_out(query, table)
    bank = NNMemoryBankModule(size=tuple(table.shape))
    bank.bank.copy_(table)
    return lambda: bank(query, update=False)


def one_neighbour(batch: int, size: int, dim: int) -> dict[str, Lookup]:
    """Variants of finding the nearest row."""
    query, table = unit(batch, dim), unit(size, dim)
    theirs = host.load().solo.methods.NNCLR.find_nn
    held = SimpleNamespace(queue=table)
    compiled = torch.compile(plain, dynamic=False)
    return {
        "ours": lambda: ours(query, table),
        "again": lambda: ours(query, table),
        "solo-learn": lambda: theirs(held, query)[1],
        "lightly": lightlys(query, table),
        "compiled": lambda: compiled(query, table),
    }


def not_the_own_image(batch: int, size: int, dim: int) -> dict[str, Lookup]:
    """Variants of finding the nearest row that is not of the query's own image."""
    query, table = unit(batch, dim), unit(size, dim)
    own, ids = torch.randint(IMAGES, (batch,)), torch.randint(IMAGES, (size,))
    return {
        "ours": lambda: ours(query, table, query_ids=own, table_ids=ids),
        "again": lambda: ours(query, table, query_ids=own, table_ids=ids),
        "plain": lambda: plain_without_own(query, table, own, ids),
    }


def five_neighbours(batch: int, size: int, dim: int) -> dict[str, Lookup]:
    """Variants of finding the five nearest rows."""
    query, table = unit(batch, dim), unit(size, dim)
    return {
        "ours": lambda: ours(query, table, 5),
        "again": lambda: ours(query, table, 5),
        "plain": lambda: table[(query @ table.T).topk(5, dim=1)[1]],
    }


def same_rows(variants: dict[str, Lookup]) -> dict[str, float]:
    """Share of queries for which each variant gives the rows that ours gives."""
    found = {name: work().reshape(-1) for name, work in variants.items()}
    batch = variants["ours"]().shape[0]
    expected = found["ours"].reshape(batch, -1)
    # Rows are random: equal embeddings are the same row.
    return {
        name: float((rows.reshape(batch, -1) == expected).all(1).float().mean())
        for name, rows in found.items()
    }


def main() -> None:
    """Prints a table per task and size."""
    found = Record(__doc__)
    lightly = f"lightly {version('lightly')}" if NNMemoryBankModule else "lightly, written out"
    found["peers"] = [f"solo-learn {host.detect().generation}", lightly]
    print(*found["peers"], sep=", ")
    for label, make in (
        ("nearest", one_neighbour),
        ("nearest but the own image", not_the_own_image),
        ("five nearest", five_neighbours),
    ):
        for batch, size, dim in SIZES if make is one_neighbour else SIZES[:1]:
            variants = make(batch, size, dim)
            rows = race(variants, ROUNDS)
            same = same_rows(variants)
            print(f"{label}, N {batch}, K {size}, D {dim}")
            for name, row in rows.items():
                found_row = {**row, "mib": peak_mib(variants[name]), "rows": same[name]}
                found.setdefault(f"{label} {batch} x {size} x {dim}", {})[name] = found_row
                show(name, found_row, f"rows {same[name]:.3f}")
    found.write()


if __name__ == "__main__":
    main()
