"""Sinkhorn-Knopp: ours, the usual one, compiled, the host's.

    python benchmarks/sinkhorn.py [--json FILE]          # lightly's too where installed

Three iterations at epsilon 0.04 on cosines, one thread, all variants in turn, ten rounds after ten
to warm up; the ratio is that of the median round to ours of the same round, `again` is ours a
second time (what equals differ by). `ours` makes the (N, K) assignments from any scores, `unit`
from cosines that are known to be some; `factors` and `bfloat16` are what the ProtoCPC step does,
which needs the exponentials and their scaling vectors alone. The usual form rewrites the matrix
twice per iteration, as SwAV's formula does. Memory is the largest sum of live allocations beyond
the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import Record, peak_mib, race, show
from torch import Tensor

from solo_ext import host
from solo_ext.kernels.sinkhorn import Assignment, assign
from solo_ext.modules import sinkhorn

try:
    from lightly.loss.swav_loss import sinkhorn as lightly_sinkhorn
except ImportError:
    lightly_sinkhorn = None

ROUNDS, BATCH, DIM, EPSILON, ITERATIONS = 10, 512, 128, 0.04, 3


def usual_sinkhorn(
    scores: Tensor, epsilon: float = EPSILON, iterations: int = ITERATIONS
) -> Tensor:
    """The formula, with the whole matrix rewritten at every step."""
    with torch.no_grad():
        assignments = torch.exp(scores / epsilon).T
        prototypes, samples = assignments.shape
        assignments /= assignments.sum()
        for _ in range(iterations):
            assignments /= assignments.sum(1, keepdim=True)
            assignments /= prototypes
            assignments /= assignments.sum(0, keepdim=True)
            assignments /= samples
        assignments *= samples
        return assignments.T


def factors(scores: Tensor, storage: torch.dtype | None = None) -> Assignment:
    """Scaling vectors of cosines, as the fused step finds them."""
    return assign(
        lambda rows, columns: scores[rows, columns] * (1 / EPSILON),
        (scores.shape[0], scores.shape[1]),
        scores,
        ITERATIONS,
        bound=1 / EPSILON,
        storage=storage,
    )


def product_of(found: Assignment) -> Tensor:
    """The assignments themselves."""
    return found.matrix * found.columns * found.rows.unsqueeze(1)


def measure(size: int) -> dict[str, dict[str, Any]]:
    """Milliseconds, ratio to ours, memory, and how far a row is from the usual one."""
    rows, prototypes = (F.normalize(torch.randn(n, DIM), dim=1) for n in (BATCH, size))
    scores = rows @ prototypes.T
    compiled = torch.compile(usual_sinkhorn, dynamic=False)
    theirs = host.load().solo.utils.sinkhorn_knopp.SinkhornKnopp(ITERATIONS, EPSILON, 1)
    variants: dict[str, Callable[[], Tensor | Assignment]] = {
        "ours": lambda: sinkhorn(scores, EPSILON, ITERATIONS),
        "again": lambda: sinkhorn(scores, EPSILON, ITERATIONS),
        "unit": lambda: sinkhorn(scores, EPSILON, ITERATIONS, unit=True),
        "factors": lambda: factors(scores),
        "bfloat16": lambda: factors(scores, torch.bfloat16),
        "usual": lambda: usual_sinkhorn(scores),
        "compiled": lambda: compiled(scores),
        "solo-learn": lambda: theirs(scores),
    }
    if lightly_sinkhorn is not None:
        variants["lightly"] = lambda: lightly_sinkhorn(scores, ITERATIONS, EPSILON)
    found = race(variants, ROUNDS)
    expected = usual_sinkhorn(scores)
    measured = {}
    for name, row in found.items():
        made = variants[name]()
        probs = product_of(made) if isinstance(made, Assignment) else made
        error = float((probs - expected).abs().sum(1).max())
        measured[name] = {**row, "mib": peak_mib(variants[name]), "row_error": error}
        del made, probs
    return measured


def main() -> None:
    """Prints a table per number of prototypes."""
    found = Record(__doc__)
    for size in (3000, 65536):
        found[f"Sinkhorn {size}"] = rows = measure(size)
        print(f"Sinkhorn, N {BATCH}, K {size}")
        for name, row in rows.items():
            show(name, row, f"row {row['row_error']:.1e}")
    found.write()


if __name__ == "__main__":
    main()
