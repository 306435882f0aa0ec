"""What each of several gloo processes computes for ``test_pcl_distributed.py``.

A module of its own because a spawned process imports the function that it runs by name.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering.e_step import Granularity, e_step

RANKS, SAMPLES, DIM = int(os.environ.get("RANKS", "2")), 301, 16
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


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    ids = torch.arange(rank, SAMPLES, RANKS)
    found = [[vars(g) for g in granularities] for granularities in steps(ids)]
    torch.save({"steps": found}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
