"""What each of two gloo processes meets with for ``test_distributed.py``.

A module of its own, of which each process runs ``run``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from solo_ext.clustering import e_step, kmeans, lloyd
from solo_ext.core.distributed import propagate_rank_errors
from solo_ext.core.errors import UserError
from solo_ext.lab.evaluation.online import on_first

RANKS = 2
TIMEOUT, PATIENT = 4.0, 300.0
"""Seconds after which the process group gives up: on slow ranks, and on ones that fail."""
ROWS, CLUSTERS = 400, 10
SLOW = 3
"""Iterations of slow passes; one more pass assigns the rows in the end."""
CPU = torch.device("cpu")
FAILURES: dict[str, tuple[int, Exception]] = {
    "first pass": (1, torch.OutOfMemoryError("of 9 GiB")),
    "later pass": (0, torch.OutOfMemoryError("of 8 GiB")),
    "sums": (1, torch.OutOfMemoryError("of 7 GiB")),
    "embedding": (1, UserError("image 'a.png' cannot be read")),
    "end": (0, OSError("no space left on device")),
}
"""Which rank fails where, and of what."""


def features() -> Tensor:
    """All rows, (400, 8) fp32."""
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))


def share(rank: int) -> tuple[Tensor, Tensor]:
    """Rows of a rank, all but eight of them on rank 1, and their numbers."""
    ids = torch.arange(8) if rank == 0 else torch.arange(8, ROWS)
    return features()[ids], ids


def clustered(rank: int, iterations: int = 4, **options: Any) -> tuple[Any, ...]:
    x, ids = share(rank)
    return tuple(kmeans(x, CLUSTERS, sharded=True, row_ids=ids, iterations=iterations, **options))


def before(module: Any, name: str, do: Callable[[int], None]) -> Callable[[], None]:
    """Has ``do`` called with the number of the call before a function; returns what undoes it."""
    real, calls = getattr(module, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        do(calls[0])
        return real(*args, **kwargs)

    setattr(module, name, wrapped)
    return lambda: setattr(module, name, real)


def slow_alone(rank: int) -> tuple[float, int | None]:
    """Rank 0 works for longer than the timeout."""
    begin = time.monotonic()

    def work() -> int:
        time.sleep(1.2 * TIMEOUT)
        return 7

    found = on_first(work, CPU)
    return time.monotonic() - begin, found


def slow_passes(rank: int) -> tuple[Any, ...]:
    """Each pass of rank 1 takes a third of the timeout, all four of them more than it."""
    undo = before(lloyd, "search", lambda _: time.sleep(rank * TIMEOUT / 3))
    try:
        return clustered(rank, iterations=SLOW)
    finally:
        undo()


def failures(rank: int) -> dict[str, tuple[str, str, float]]:
    """Type, message and seconds of errors on one rank alone, one after the other."""
    found = {}

    def fail(name: str) -> None:
        failing, error = FAILURES[name]
        if rank == failing:
            raise error

    def step() -> None:
        x, ids = share(rank)
        e_step(x, ids, [4, CLUSTERS], temperature=0.2, iterations=4)

    def within(name: str, function: str, at: int) -> None:
        undo = before(lloyd, function, lambda call: fail(name) if call == at else None)
        try:
            step()
        finally:
            undo()

    def embedding() -> None:
        with propagate_rank_errors(CPU):
            fail("embedding")
            step()

    def end() -> None:
        with propagate_rank_errors(CPU):
            step()
            fail("end")

    works: dict[str, Callable[[], None]] = {
        "first pass": lambda: within("first pass", "search", 1),
        "later pass": lambda: within("later pass", "search", 3),
        "sums": lambda: within("sums", "on_grid", 3),
        "embedding": embedding,
        "end": end,
    }
    for name, work in works.items():
        begin = time.monotonic()
        try:
            work()
        except Exception as raised:
            found[name] = type(raised).__name__, str(raised), time.monotonic() - begin
    return found


def run(rank: int, folder: str) -> None:
    """Goes through everything as one of the processes and saves it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENT),
    )
    limit: Any = dist.distributed_c10d
    limit._set_pg_timeout(timedelta(seconds=TIMEOUT))
    found: dict[str, Any] = {
        "slow alone": slow_alone(rank),
        "slow passes": slow_passes(rank),
        "sample": clustered(rank, sample=90, sample_seed=4),
    }
    limit._set_pg_timeout(timedelta(seconds=PATIENT))
    found["failures"] = failures(rank)
    # The group can still be used.
    found["after"] = clustered(rank)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
