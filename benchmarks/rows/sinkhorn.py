"""Sinkhorn-Knopp."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.operation import EXACT, NARROW, Case, Goal, Setup, unit
from benchmarks.record import Effort
from solo_ext import host
from solo_ext.core.precision import full_precision_products
from solo_ext.kernels.sinkhorn import Assignment, assign
from solo_ext.memory import sinkhorn

BATCH, SIZE, DIM, EPSILON, ITERATIONS = 512, 65536, 128, 0.04, 3


def plain_sinkhorn(
    scores: Tensor, epsilon: float = EPSILON, iterations: int = ITERATIONS
) -> Tensor:
    """The formula, with the whole matrix rewritten at every step as SwAV's has it."""
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
    with full_precision_products(scores.device):
        return assign(
            lambda rows, columns: scores[rows, columns] * (1 / EPSILON),
            (scores.shape[0], scores.shape[1]),
            scores,
            ITERATIONS,
            bound=1 / EPSILON,
            storage=storage,
        )


def row_error(found: Tensor | Assignment, expected: Tensor) -> float:
    """Largest sum over a row of what differs."""
    if isinstance(found, Assignment):
        found = found.matrix * found.columns * found.rows.unsqueeze(1)
    return float((found - expected).abs().sum(1).max())


def setup(effort: Effort) -> Setup:
    """Variants of the assignments of a batch."""
    scores = unit(effort, BATCH, DIM) @ unit(effort, SIZE, DIM).T
    theirs = host.load().solo.utils.sinkhorn_knopp.SinkhornKnopp(ITERATIONS, EPSILON, 1)
    return Setup(
        {
            "ours": lambda: sinkhorn(scores, EPSILON, ITERATIONS),
            "factors": lambda: factors(scores),
            "factors, bfloat16": lambda: factors(scores, torch.bfloat16),
            PLAIN: lambda: plain_sinkhorn(scores),
            "solo-learn": lambda: theirs(scores),
        },
        row_error,
    )


PLAIN = "plain (SwAV)"
CASES = (
    Case(
        "Sinkhorn 512 x 65,536",
        setup,
        (
            Goal(PLAIN, 2.0, 1.9, ours="factors", most_difference=EXACT, most_launches=27),
            Goal("solo-learn", 2.0, ours="factors", most_difference=EXACT),
            Goal(PLAIN, 2.8, 3.4, ours="factors, bfloat16", most_difference=NARROW),
            Goal("solo-learn", 0, most_difference=EXACT, most_launches=87),
            Goal(PLAIN, 4.0, ours="factors", device="cuda"),
        ),
    ),
)
