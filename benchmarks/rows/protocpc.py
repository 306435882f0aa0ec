"""The ProtoCPC step, and the SEED loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.operation import (
    EXACT,
    NARROW,
    Case,
    Form,
    Goal,
    Setup,
    compiled,
    in_bfloat16,
    of_losses,
    unit,
)
from benchmarks.record import Effort
from benchmarks.rows.sinkhorn import plain_sinkhorn
from solo_ext.losses import protocpc_step, seed_loss_func
from solo_ext.losses.seed import plain_seed

BATCH, SIZE = 512, 65536


def pseudo_code(student: Tensor, teacher: Tensor, prototypes: Tensor, prior: Tensor) -> Tensor:
    """Algorithm 1, from the features; the prototypes are copied to the teacher at every step."""
    with torch.no_grad():
        probs = plain_sinkhorn(teacher @ prototypes.detach().clone().T, 0.04, 3)
        prior = 0.9 * prior + 0.1 * len(prior) * probs.mean(0)
    scaled = student @ prototypes.T / 0.1
    align = -(probs * scaled).sum(1)
    return (align + torch.logsumexp(scaled + prior.log(), dim=1)).mean()


def ours(
    student: Tensor,
    teacher: Tensor,
    prototypes: Tensor,
    prior: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Of one view of each."""
    views = student.unsqueeze(0), teacher.unsqueeze(0)
    return protocpc_step(*views, prototypes, prior, compute_dtype=dtype).loss


def step(effort: Effort, learns: bool) -> Setup:
    """Variants of the step, with or without a gradient to the prototypes."""
    student, teacher = unit(effort, BATCH, 256).requires_grad_(), unit(effort, BATCH, 256)
    prototypes = unit(effort, SIZE, 256).requires_grad_(learns)
    prior = torch.ones(len(prototypes), device=effort.device)
    forms: dict[str, Form | str] = {
        "ours": ours,
        "bfloat16": in_bfloat16(effort, partial(ours, dtype=torch.bfloat16)),
        PEER: pseudo_code,
        "compiled": compiled(effort, pseudo_code),
    }
    return of_losses((student, teacher, prototypes, prior), forms)


def seed(effort: Effort) -> Setup:
    """Variants of SEED."""
    student, teacher = unit(effort, BATCH, 128).requires_grad_(), unit(effort, BATCH, 128)
    plain = partial(plain_seed, student_temperature=0.2, teacher_temperature=0.01)
    inputs = student, teacher, unit(effort, SIZE, 128)
    return of_losses(inputs, {"ours": seed_loss_func, "plain": plain})


PEER = "pseudo-code"
EAGER = 0.8
"""Of the targets in bfloat16, 4.0 and 4.5, which are a compiled step's: ours is not compiled."""
CASES = (
    Case(
        "ProtoCPC step, learnable prototypes 512 x 65,536 x 256",
        partial(step, learns=True),
        (
            Goal(PEER, 1.5, 3.3, most_difference=EXACT, most_launches=89),
            Goal("compiled", 0.95, most_difference=EXACT),
            Goal(PEER, EAGER * 4.0, ours="bfloat16", most_difference=NARROW),
            Goal(PEER, 5.0, ours="bfloat16", device="cuda", most_ms=0.5),
        ),
    ),
    Case(
        "ProtoCPC step, constant prototypes 512 x 65,536 x 256",
        partial(step, learns=False),
        (
            Goal(PEER, 1.6, 4.5, most_difference=EXACT),
            Goal(PEER, EAGER * 4.5, ours="bfloat16", most_difference=NARROW),
            Goal(PEER, 5.0, ours="bfloat16", device="cuda"),
        ),
    ),
    Case(
        "SEED 512 x 65,536 x 128",
        seed,
        (Goal("plain", 0, most_difference=EXACT, most_launches=73),),
    ),
)
