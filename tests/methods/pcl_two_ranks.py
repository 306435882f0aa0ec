"""What each of two gloo processes computes for ``test_pcl_distributed.py``.

A module of its own because a spawned process imports the function that it runs by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from solo_ext.clustering.e_step import Granularity, e_step
from solo_ext.modules.feature_bank import FeatureBank
from solo_ext.modules.state import keep_out_of_broadcast

RANKS, SAMPLES, DIM = 2, 301, 16
SIZES = [4, 30, 300]


def features() -> Tensor:
    """Returns (301, 16) unit rows around ten directions."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, DIM, generator=generator)
    spread = 0.3 * torch.randn(SAMPLES, DIM, generator=generator)
    return F.normalize(centres[torch.arange(SAMPLES) % 10] + spread, dim=1)


def steps(ids: Tensor) -> list[list[Granularity]]:
    """A cold E-step, and a warm one on features that moved."""
    found: list[list[Granularity]] = []
    moved = F.normalize(features() + 0.1 * features().roll(1, 0), dim=1)
    for table in (features(), moved):
        init = [g.means for g in found[-1]] if found else None
        found.append(e_step(table[ids], ids, SAMPLES, SIZES, temperature=0.2, init=init))
    return found


class Wrapped(nn.Module):
    """A network with a bank, as DDP wraps a method."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4))
        self.bank = FeatureBank(DIM)
        self.bank.resize_(SAMPLES)
        keep_out_of_broadcast(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def bank_after_a_step(rank: int) -> dict[str, Any]:
    """What a rank's bank and batch norm hold after a forward pass under DDP."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(Wrapped())
    own = torch.arange(rank, SAMPLES, RANKS)
    bank = wrapped.module.bank
    bank.update_(own, features()[own])
    for _ in range(2):
        # The second pass begins with the broadcast of what the first one changed.
        wrapped(features()[own]).sum().backward()
    return {"value": bank.value, "filled": bank.filled}


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    ids = torch.arange(rank, SAMPLES, RANKS)
    found = [[vars(g) for g in granularities] for granularities in steps(ids)]
    torch.save({"steps": found, "bank": bank_after_a_step(rank)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
