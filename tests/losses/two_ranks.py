"""What each of two gloo processes computes for ``test_distributed.py``.

A module of its own because a spawned process imports the function that it runs by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solo_ext import distributed
from solo_ext.losses import nt_xent_loss_func
from solo_ext.losses.debiased import debiased_terms

RANKS = 2


class Case(NamedTuple):
    """A loss on a batch; ``tau_plus=None`` is NT-Xent."""

    batch: int
    temperature: float
    tau_plus: float | None


CASES = [
    Case(batch, temperature, tau_plus)
    for batch in (1, 2, 7)
    for temperature in (0.1, 0.5)
    for tau_plus in (None, 0.0, 0.1)
]


class Step(NamedTuple):
    """What one process, or the only one, gets."""

    loss: Tensor
    floored: Tensor
    gradients: list[Tensor]


def network() -> nn.Module:
    """Returns the same fp64 network in every process, without batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def joined_batch(case: Case) -> Tensor:
    """Returns (2, ranks * batch, 6): both views of the whole batch."""
    generator = torch.Generator().manual_seed(case.batch)
    rows = torch.randn(1, RANKS * case.batch, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, RANKS * case.batch, 6, generator=generator, dtype=torch.float64)
    return rows + noise


def step(case: Case, model: nn.Module, views: Tensor) -> Step:
    """Runs forward and backward on (2, N, 6)."""
    z1, z2 = model(views.flatten(0, 1)).chunk(2)
    if case.tau_plus is None:
        loss, floored = nt_xent_loss_func(z1, z2, case.temperature), torch.zeros(())
    else:
        loss, floored = debiased_terms(z1, z2, case.temperature, case.tau_plus)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return Step(loss.detach(), floored, gradients)


def weights(rank: int) -> Tensor:
    """Returns (4, 3) weights of a rank's own loss."""
    return torch.arange(12.0).view(4, 3) * (rank + 1) + 0.5


def gathers(rank: int) -> dict[str, Any]:
    """Gathers tensors of several kinds, with and without gradient."""
    own = torch.arange(6.0).view(2, 3) + 100 * rank
    found: dict[str, Any] = {
        "plain": distributed.gather(own),
        "transposed": distributed.gather(own.T),
        "integer": distributed.gather(torch.tensor([rank, 10 + rank])),
        "leaf": distributed.gather(own.clone().requires_grad_()),
        "rank": distributed.rank(),
        "world_size": distributed.world_size(),
    }
    x = own.clone().requires_grad_()
    y = distributed.gather_with_gradient(x)
    found["with gradient"] = y.detach()
    (y * weights(rank)).sum().backward()
    found["gradient"] = x.grad
    # An expanded, non-contiguous incoming gradient.
    x = own.clone().requires_grad_()
    distributed.gather_with_gradient(x).sum().mul(rank + 1).backward()
    found["gradient of sum"] = x.grad
    # The gradient of a sum is one tensor, which both of its terms receive.
    x, bias = own.clone().requires_grad_(), torch.ones(4, 3, requires_grad=True)
    shifted = 2 * bias
    ((distributed.gather_with_gradient(x) + shifted) * weights(rank)).sum().backward()
    found["gradient of bias"] = bias.grad
    found["gradient beside bias"] = x.grad
    return found


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    steps = []
    for case in CASES:
        own = slice(rank * case.batch, (rank + 1) * case.batch)
        done = step(case, network(), joined_batch(case)[:, own])
        for gradient in done.gradients:
            # What DDP does to parameters; its import alone takes seconds.
            dist.all_reduce(gradient)
            gradient /= RANKS
        steps.append(tuple(done))
    torch.save({"steps": steps, "gathers": gathers(rank)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
