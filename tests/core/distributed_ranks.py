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
TIMEOUT, PATIENT = 6.0, 300.0
"""Seconds after which the process group gives up: on slow ranks, and on ones that fail."""
ROWS, CLUSTERS = 400, 10
CPU = torch.device("cpu")


def features() -> Tensor:
    """All rows, (400, 8) fp32."""
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))


def share(rank: int) -> tuple[Tensor, Tensor]:
    """Rows of a rank, all but eight of them on rank 1, and their numbers."""
    ids = torch.arange(8) if rank == 0 else torch.arange(8, ROWS)
    return features()[ids], ids


def clustered(rank: int, **options: Any) -> tuple[Any, ...]:
    x, ids = share(rank)
    return tuple(kmeans(x, CLUSTERS, sharded=True, row_ids=ids, iterations=4, **options))


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
        time.sleep(1.5 * TIMEOUT)
        return 7

    found = on_first(work, CPU)
    return time.monotonic() - begin, found


def slow_passes(rank: int) -> tuple[Any, ...]:
    """Each pass of rank 1 takes a third of the timeout, all of them more than it."""
    undo = before(lloyd, "search", lambda _: time.sleep(rank * TIMEOUT / 3))
    try:
        return clustered(rank)
    finally:
        undo()


def fails(message: str, kind: type[Exception], at: int) -> Callable[[int], None]:
    def fail(call: int) -> None:
        if call == at:
            raise kind(message)

    return fail


def failures(rank: int) -> dict[str, tuple[str, str, float]]:
    """Type, message and seconds of errors on one rank alone, one after the other."""
    found = {}
    memory = torch.OutOfMemoryError

    def step(rank: int) -> None:
        x, ids = share(rank)
        e_step(x, ids, [4, CLUSTERS], temperature=0.2, iterations=4)

    def embed(rank: int) -> None:
        with propagate_rank_errors(CPU):
            if rank == 1:
                raise UserError("image 'a.png' cannot be read")
            step(rank)

    def last(rank: int) -> None:
        with propagate_rank_errors(CPU):
            step(rank)
            if rank == 0:
                raise OSError("no space left on device")

    cases: dict[str, tuple[Any, str, int, Exception | None, Callable[[int], object]]] = {
        "first pass": (lloyd, "search", 1, memory("of 9 GiB"), step),
        "later pass": (lloyd, "search", 0, memory("of 8 GiB"), step),
        "sums": (lloyd, "on_grid", 1, memory("of 7 GiB"), step),
        "embedding": (lloyd, "search", 2, None, embed),
        "end": (lloyd, "search", 2, None, last),
    }
    for name, (module, function, failing, error, work) in cases.items():
        undo: Callable[[], None] | None = None
        if rank == failing and error is not None:
            at = 1 if name == "first pass" else 3
            undo = before(module, function, fails(str(error), type(error), at))
        begin = time.monotonic()
        try:
            work(rank)
        except Exception as raised:
            found[name] = type(raised).__name__, str(raised), time.monotonic() - begin
        finally:
            if undo is not None:
                undo()
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
