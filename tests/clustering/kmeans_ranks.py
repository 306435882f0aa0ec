"""What each of several gloo processes computes for ``test_distributed_kmeans.py``.

A module of its own, of which each process runs ``run``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from solo_ext.clustering import Granularity, e_step, kmeans
from solo_ext.clustering.relocation import merge_costs
from solo_ext.clustering.rows import Rows, rows_of

RANKS = int(os.environ.get("RANKS", "2"))
ROWS, CLUSTERS, SAMPLES = 900, 25, 301
MERGED = 1100
"""Clusters whose merge costs take three tiles."""

IN_A_FILE = 2
"""So many ranks have the features of E-steps in files; more ranks have them in memory."""
ENDS = {2: (617,), 4: (617, 700, 850)}
"""Where the rows of all ranks but the last end."""
STARTS = ["cold", "restarts", "refilled", "warm", "relocated", "hierarchical"]
DEALS = ["in order", "alternating", "shuffled", "one has all"]
PAIRS = [*((deal, "cold") for deal in DEALS), *(("shuffled", start) for start in STARTS[1:])]
"""Rows are dealt before anything starts: every deal with one start, every start with one deal."""


def features() -> Tensor:
    """Returns all rows, (900, 12) fp32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 12, generator=generator)


def share(deal: str, rank: int) -> Tensor:
    """Numbers of a rank's rows."""
    numbers = torch.arange(ROWS)
    if deal == "alternating":
        return numbers[rank::RANKS]
    if deal == "shuffled":
        numbers = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    ends = [0, *[ROWS] * (RANKS - 1)] if deal == "one has all" else [*ENDS[RANKS], ROWS]
    return numbers[(0, *ends)[rank] : ends[rank]]


def options(start: str) -> dict[str, Any]:
    """Arguments of each kind of start."""
    if start == "cold":
        return {"num_clusters": CLUSTERS, "iterations": 6}
    if start == "restarts":
        return {"num_clusters": CLUSTERS, "iterations": 2, "restarts": 3}
    if start == "hierarchical":
        return {"num_clusters": 90, "iterations": 6, "backend": start}
    if start == "relocated":
        # Crowded prototypes, more than are tried at a time.
        init = features()[:150].clone()
        init[50:] = init[50] + 0.1 * init[50:]
        return {"num_clusters": 150, "init": init, "iterations": 6}
    # Most clusters begin empty: the refills must agree too.
    init = features()[:CLUSTERS].clone()
    init[5:] = 1e3
    relocate = start == "warm"
    return {"num_clusters": CLUSTERS, "init": init, "iterations": 6, "relocate": relocate}


class Products(TorchFunctionMode):
    """Counts the rows of products with a bias."""

    rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.addmm:
            self.rows += len(args[1])
        return func(*args, **(kwargs or {}))


def merged(rows: Rows) -> tuple[Tensor, Tensor, int]:
    """Costs and partners of clusters, some of them empty, and what part of them was computed."""
    generator = torch.Generator().manual_seed(2)
    means = torch.randn(MERGED, 3, generator=generator, dtype=torch.float64)
    sizes = torch.randint(4, (MERGED,), generator=generator)
    with Products() as products:
        return *merge_costs(means, sizes, rows), products.rows


def mapped(x: Tensor, folder: Path) -> Tensor:
    """The same rows in a file."""
    file = folder / f"features-{os.getpid()}"
    found = torch.from_file(str(file), shared=True, size=x.numel(), dtype=x.dtype).view(x.shape)
    return found.copy_(x)


def steps(ids: Tensor, folder: Path | None = None) -> list[list[Granularity]]:
    """A cold E-step, and a warm one on features that moved; of 301 rows around ten directions.

    Args:
        ids: rows of this process.
        folder: of a file that the features lie in; by default in memory.
    """
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 16, generator=generator)
    spread = 0.3 * torch.randn(SAMPLES, 16, generator=generator)
    x = F.normalize(centres[torch.arange(SAMPLES) % 10] + spread, dim=1)
    found: list[list[Granularity]] = []
    for table in (x, F.normalize(x + 0.1 * x.roll(1, 0), dim=1)):
        init = [g.means for g in found[-1]] if found else None
        own = table[ids] if folder is None else mapped(table[ids], folder)
        found.append(e_step(own, ids, [4, 30, 300], temperature=0.2, init=init))
    return found


def refusals(rank: int) -> dict[str, str]:
    """Messages where the mistake is on one rank, or shows only over both."""
    doubled = share("in order", rank).clone()
    x = features()[doubled]
    if rank == 1:
        doubled[0] = 0
    broken = x.clone()
    broken[:3] = float("nan") if rank == 0 else 0.0
    found = {}
    for name, call in {
        "nan": lambda: kmeans(broken, 4, sharded=True),
        "doubled": lambda: kmeans(x, 4, sharded=True, row_ids=doubled),
        "too many": lambda: kmeans(x, ROWS + 1, sharded=True),
    }.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    found: dict[str, Any] = {}
    for deal, start in PAIRS:
        ids = share(deal, rank)
        result = kmeans(features()[ids], sharded=True, row_ids=ids, **options(start))
        found[f"{deal}, {start}"] = tuple(result)
    x = features()[share("in order", rank)]
    found["no ids"] = tuple(kmeans(x, CLUSTERS, sharded=True, iterations=6))
    # Every rank brings its own; that of rank 0 counts.
    init = features()[:CLUSTERS] + rank
    found["own init"] = tuple(kmeans(x, CLUSTERS, sharded=True, init=init, iterations=6))
    found["merged"] = merged(rows_of(x, None, True))
    found["refusals"] = refusals(rank)
    own = steps(torch.arange(rank, SAMPLES, RANKS), Path(folder) if RANKS == IN_A_FILE else None)
    found["steps"] = [[tuple(granularity) for granularity in step] for step in own]
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
