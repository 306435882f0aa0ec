"""What each of several gloo processes looks up and keeps for ``test_shares.py``.

A module of its own, of which each process runs ``run``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank
from solo_ext.memory.heads import ClassWeights
from solo_ext.methods.e_step import _mutual_information

RANKS = int(os.environ.get("RANKS", "2"))
SAMPLES, CLUSTERS, D = 23, 5, 3
BATCHES = [
    list(range(12)),
    [22, 21, 20, 19, 0, 1, 2, 3, 4, 5, 6, 7],
    # All of the first rank, for two and four of them.
    [0, 4, 8, 12],
    # The next sample stands in for an unreadable one.
    [13, 13, 12, 12],
]


def drawn(seed: int = 0) -> Tensor:
    """Clusters (2, 23) of all samples."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CLUSTERS, (2, SAMPLES), generator=generator, dtype=torch.int32)


def rows(batch: int) -> Tensor:
    """What a batch brings to the bank."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(len(BATCHES[batch]), D, generator=generator)


def own(values: Any) -> Any:
    """This rank's part of a batch."""
    count, rank = len(values) // distributed.world_size(), distributed.rank()
    return values[rank * count : (rank + 1) * count]


def clustered(assignments: Tensor) -> ClusterPrototypes:
    """As an E-step leaves them."""
    state = ClusterPrototypes([CLUSTERS, CLUSTERS], D)
    tables = [torch.ones(CLUSTERS, D)] * 2, [torch.ones(CLUSTERS)] * 2
    state.update_(3, *tables, [*distributed.share_of(assignments, 1)])
    return state


def banks() -> list[FeatureBank]:
    """As it is after each batch."""
    found = []
    bank = FeatureBank(D)
    bank.resize_(SAMPLES)
    for number, batch in enumerate(BATCHES):
        samples = distributed.gather(own(torch.tensor(batch)))
        bank.update_(samples, distributed.gather(own(rows(number))))
        found.append(FeatureBank(D))
        found[-1].value, found[-1].filled = bank.value.clone(), bank.filled.clone()
    return found


def everything() -> dict[str, Any]:
    """Of one process or of several."""
    # Blocks of some rows, the last of them not whole.
    distributed._AT_ONCE = 3 * 4 * D * RANKS
    state = clustered(drawn())
    other = clustered(drawn(1)).assignments[0]
    weights = ClassWeights(CLUSTERS, D)
    held = nn.ModuleDict({"prototypes": state, "bank": banks()[-1]})
    return {
        "of": [state.assignments_of(own(torch.tensor(batch))) for batch in BATCHES],
        "banks": [bank.state_dict() for bank in banks()],
        "rows": len(state.assignments[0]),
        "state": held.state_dict(),
        "empty": FeatureBank(D).state_dict(),
        "match": weights.rematch_(state.assignments[0], other),
        "information": _mutual_information(state.assignments[0], drawn(1)[0]),
    }


def continued(folder: str) -> dict[str, Any]:
    """What processes make of one process's checkpoint."""
    held = nn.ModuleDict({"prototypes": clustered(drawn(2)), "bank": FeatureBank(D)})
    held.load_state_dict(torch.load(Path(folder) / "alone.pt"))
    prototypes: Any = held["prototypes"]
    batch = own(torch.tensor(BATCHES[1]))
    return {
        "of": prototypes.assignments_of(batch),
        "epoch": prototypes.epoch,
        "state": held.state_dict(),
    }


def run(rank: int, folder: str) -> None:
    """Computes everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    if rank == 0:
        alone = nn.ModuleDict({"prototypes": clustered(drawn()), "bank": banks()[-1]})
        torch.save(alone.state_dict(), Path(folder) / "alone.pt")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    found = everything()
    dist.barrier()
    found["continued"] = continued(folder)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
