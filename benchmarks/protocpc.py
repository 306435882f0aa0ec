"""The ProtoCPC step and the SEED loss: ours, the pseudo-code, compiled.

    python benchmarks/protocpc.py [--json FILE]

Forward and backward on one thread, all variants in turn, ten rounds after ten to warm up; the
ratio is that of the median round to ours of the same round, `again` is ours a second time (what
equals differ by). The pseudo-code is the paper's Algorithm 1, with Sinkhorn as usually written and
the prototypes copied to the teacher at every step, in `compiled` under torch.compile; `compiled
bf16` is the same with the factors of its products in bf16. Its networks' logits live while the
loss is made, as they do where a loss takes logits. SEED's plain form is its formula:
logits, concatenation, two softmaxes. Memory is the largest sum of live allocations beyond the
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from interleaved import Record, Work, peak_mib, race, show
from sinkhorn import usual_sinkhorn
from torch import Tensor

from solo_ext.losses import protocpc_step, seed_loss_func

ROUNDS, BATCH = 10, 512
Step = Callable[[], tuple[Tensor, ...]]


def unit(rows: int, dim: int) -> Tensor:
    """Random unit rows."""
    return F.normalize(torch.randn(rows, dim), dim=1)


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``a @ b.T`` with factors of ``dtype``."""
    return a @ b.T if dtype is None else (a.to(dtype) @ b.to(dtype).T).float()


def algorithm(student: Tensor, teacher: Tensor, prior: Tensor) -> Tensor:
    """Algorithm 1, from the logits (N, K) that the two networks end in."""
    with torch.no_grad():
        probs = usual_sinkhorn(teacher, 0.04, 3)
        prior = 0.9 * prior + 0.1 * len(prior) * probs.mean(0)
    scaled = student / 0.1
    align = -(probs * scaled).sum(1)
    return (align + torch.logsumexp(scaled + prior.log(), dim=1)).mean()


def pseudo_code(
    student: Tensor,
    teacher: Tensor,
    prototypes: Tensor,
    prior: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Algorithm 1, from the features."""
    with torch.no_grad():
        copied = prototypes.detach().clone()
        of_teacher = product(teacher, copied, dtype)
    of_student = product(student, prototypes, dtype)
    return algorithm(of_student, of_teacher, prior)


def step(size: int, dim: int, learns: bool) -> tuple[Tensor, dict[str, Step]]:
    """Variants of the step with ``size`` prototypes."""
    student, teacher = unit(BATCH, dim).requires_grad_(), unit(BATCH, dim)
    prototypes, prior = unit(size, dim).requires_grad_(learns), torch.ones(size)
    wanted = (student, prototypes) if learns else (student,)
    compiled = torch.compile(pseudo_code, dynamic=False)

    def ours(dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        views = student.unsqueeze(0), teacher.unsqueeze(0)
        terms = protocpc_step(*views, prototypes, prior, compute_dtype=dtype)
        return torch.autograd.grad(terms.loss, wanted)

    def plain(loss: Callable[..., Tensor], *rest: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(student, teacher, prototypes, prior, *rest), wanted)

    return student, {
        "ours": ours,
        "again": ours,
        "bfloat16": lambda: ours(torch.bfloat16),
        "pseudo-code": lambda: plain(pseudo_code),
        "compiled": lambda: plain(compiled),
        "compiled bf16": lambda: plain(compiled, torch.bfloat16),
    }


def plain_seed(student: Tensor, teacher: Tensor, queue: Tensor) -> Tensor:
    """The formula, as (N, 1 + K) matrices of logits."""
    own = (student * teacher).sum(1, keepdim=True), (teacher * teacher).sum(1, keepdim=True)
    logits = torch.cat((own[0], student @ queue.T), 1) / 0.2
    target = (torch.cat((own[1], teacher @ queue.T), 1) / 0.01).softmax(1)
    return -(target * logits.log_softmax(1)).sum(1).mean()


def seed(size: int, dim: int, _: bool) -> tuple[Tensor, dict[str, Step]]:
    """Variants of SEED with a queue of ``size``."""
    student, teacher, queue = unit(BATCH, dim).requires_grad_(), unit(BATCH, dim), unit(size, dim)
    compiled = torch.compile(plain_seed, dynamic=False)

    def of(loss: Callable[..., Tensor], *rest: Any) -> Step:
        return lambda: torch.autograd.grad(loss(student, teacher, queue, *rest), student)

    return student, {
        "ours": of(seed_loss_func),
        "again": of(seed_loss_func),
        "bfloat16": of(seed_loss_func, 0.2, 0.01, torch.bfloat16),
        "plain": of(plain_seed),
        "compiled": of(compiled),
    }


def measure(student: Tensor, variants: dict[str, Step]) -> dict[str, dict[str, Any]]:
    """Milliseconds, ratio to ours, memory, and how far the gradients are from ours."""
    steps: dict[str, Work] = dict(variants)
    rows = race(steps, ROUNDS)
    ours = on_sphere(student, variants["ours"]())
    measured: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        found = on_sphere(student, variants[name]())
        errors = [float((g - o).norm() / o.norm()) for g, o in zip(found, ours, strict=True)]
        measured[name] = {**row, "mib": peak_mib(steps[name]), "gradient_errors": errors}
    return measured


def on_sphere(student: Tensor, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The student's gradient across the sphere: the plain forms do not normalise inside."""
    first, *rest = gradients
    rows = student.detach()
    return first - (first * rows).sum(1, keepdim=True) * rows, *rest


def main() -> None:
    """Prints a table per loss and size."""
    found = Record(__doc__)
    for label, make, size, dim, learns in (
        ("ProtoCPC, learnable prototypes", step, 65536, 256, True),
        ("ProtoCPC, constant prototypes", step, 65536, 256, False),
        ("ProtoCPC, learnable prototypes", step, 3000, 128, True),
        ("SEED", seed, 65536, 128, False),
    ):
        found[f"{label} {size}"] = rows = measure(*make(size, dim, learns))
        print(f"{label}, N {BATCH}, D {dim}, K {size}")
        for name, row in rows.items():
            show(name, row, " ".join(f"{e:.1e}" for e in row["gradient_errors"]))
    found.write()


if __name__ == "__main__":
    main()
