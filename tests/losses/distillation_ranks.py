"""What each of several gloo processes computes for ``test_distillation_distributed.py``.

A module of its own because a spawned process imports the function that it runs by name.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from solo_ext.losses import protocpc_step
from solo_ext.memory import PrototypePrior, sinkhorn

RANKS = int(os.environ.get("RANKS", "2"))
VIEWS, TARGETS, BATCH, K, D = 3, 2, 8, 11, 5

SPLITS = {
    "even": {2: (4, 4), 4: (2, 2, 2, 2)},
    "uneven": {2: (3, 5), 4: (3, 1, 2, 2)},
    "one": {2: (1, 7), 4: (1, 1, 5, 1)},
}
"""How many of the samples each process has."""

SCORES: dict[str, tuple[float, dict[str, Any]]] = {
    "bounded": (0.05, {"unit": True}),
    "shifted": (0.05, {}),
    "cold": (0.01, {"iterations": 7}),
}

STEPS: dict[str, dict[str, Any]] = {
    "paper": {},
    "cold": {"teacher_temperature": 0.01},
    "softmax": {"assignment": "softmax"},
    "after": {"prior_order": "after_loss"},
    "ce": {"loss": "ce", "targets": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])},
}


def parts(split: str) -> list[slice]:
    """The samples of each process."""
    ends = list(itertools.accumulate(SPLITS[split][RANKS]))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def cosines() -> Tensor:
    """(BATCH, K), whose largest entries lie in the second half."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        F.normalize(torch.randn(n, D, generator=generator, dtype=torch.float64), dim=1)
        for n in (BATCH, K)
    )
    scores = rows @ columns.T
    scores[:4] *= 0.3
    return scores


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student and teacher views of the whole batch, prototypes, prior."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student, teacher = draw(VIEWS, BATCH, D), draw(TARGETS, BATCH, D)
    prior = draw(K).abs() + 0.1
    return student, teacher, F.normalize(draw(K, D), dim=1), K * prior / prior.sum()


def assigned(name: str, own: slice = slice(None)) -> Tensor:
    """Sinkhorn on a part of the batch."""
    epsilon, options = SCORES[name]
    return sinkhorn(cosines()[own], epsilon, **options)


def prior(own: slice = slice(None)) -> Tensor:
    """A prior that has taken in a batch."""
    held = PrototypePrior(K, 0.7).double()
    held.update_((cosines()[own] / 0.1).softmax(1))
    return held.value


def step(name: str, own: slice = slice(None)) -> dict[str, Tensor]:
    """Value, gradients and prior of the step on a part of the batch."""
    student, teacher, prototypes, held = inputs()
    student, prototypes = student[:, own].requires_grad_(), prototypes.requires_grad_()
    terms = protocpc_step(student, teacher[:, own], prototypes, held, **STEPS[name])
    to_student, to_prototypes = torch.autograd.grad(terms.loss, (student, prototypes))
    return {
        "loss": terms.loss.detach(),
        "prior": terms.prior,
        "student": to_student,
        "prototypes": to_prototypes,
    }


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    own = {split: parts(split)[rank] for split in SPLITS}
    found: dict[str, Any] = {
        "sinkhorn": {(s, n): assigned(n, part) for s, part in own.items() for n in SCORES},
        "prior": {s: prior(part) for s, part in own.items()},
        "step": {n: step(n, own["even"]) for n in STEPS},
        "uneven prior": step("paper", own["uneven"])["prior"],
    }
    for done in found["step"].values():
        # What DDP does to parameters; its import alone takes seconds.
        dist.all_reduce(done["prototypes"])
        done["prototypes"] /= RANKS
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
