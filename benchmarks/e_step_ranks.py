"""Time of the E-step's clustering, shared out to processes of one thread each.

    python -m benchmarks.e_step_ranks [--ranks 1 2] [--rows 100000] [--clusters 250 500 1000]
        [--device cpu] [--rounds 3] [--json FILE]

Unit rows around 2,000 directions: a cold E-step, then a warm one. Groups of processes take turns;
each time is that of the slowest process, its median over the rounds. Cores that processes have to
share say nothing. On a GPU, which one process has, its peak of memory is given too, features
included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing

from solo_ext.clustering import e_step, resolve_backend
from solo_ext.core.files import append_lines
from solo_ext.lab.training.run_dir import environment

WIDTH, DIRECTIONS = 128, 2000


def features(rows: int) -> Tensor:
    """(rows, 128), unit length."""
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(DIRECTIONS, WIDTH, generator=generator), dim=1)
    spread = 0.1 * torch.randn(rows, WIDTH, generator=generator)
    return F.normalize(centres[torch.arange(rows) % DIRECTIONS] + spread, dim=1)


def work(
    rank: int, ranks: int, rows: int, clusters: Sequence[int], device: str, folder: str
) -> None:
    """What each process does; it leaves its two times in the folder, and its peak of memory."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    ids = torch.arange(rank, rows, ranks)
    own, ids = features(rows)[ids].to(device), ids.to(device)
    init: list[Tensor] | None = None
    seconds = []
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        found = e_step(own, ids, clusters, temperature=0.2, init=init)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        init = [granularity.means for granularity in found]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    Path(folder, f"{rank}.json").write_text(json.dumps([*seconds, peak]))
    dist.destroy_process_group()


def measured(ranks: int, *sizes: Any) -> tuple[float, float, int]:
    """Seconds of the cold and of the warm E-step, of the slowest process, and bytes at most."""
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            work(0, ranks, *sizes, folder)
        else:
            multiprocessing.spawn(work, (ranks, *sizes, folder), nprocs=ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    cold, warm, peak = (max(values) for values in zip(*found, strict=True))
    return cold, warm, peak


def main() -> None:
    """Measures and prints."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--clusters", type=int, nargs="+", default=[250, 500, 1000])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and args.ranks != [1]:
        parser.error("--device cuda is one process's: add --ranks 1")
    sizes = args.rows, args.clusters, args.device
    rounds = [{n: measured(n, *sizes) for n in args.ranks} for _ in range(args.rounds)]
    found = []
    for ranks in args.ranks:
        cold, warm = (statistics.median(r[ranks][i] for r in rounds) for i in range(2))
        line = {"ranks": ranks, "cold": round(cold, 3), "warm": round(warm, 3)}
        print(f"{ranks} processes  cold {cold:8.2f} s  warm {warm:8.2f} s")
        if args.device == "cuda":
            line["peak_gib"] = round(max(r[ranks][2] for r in rounds) / 2**30, 2)
            print(f"peak of its memory {line['peak_gib']:.2f} GiB")
        found.append(line)
    if args.json:
        about = {
            "rows": args.rows,
            "clusters": args.clusters,
            "backend": resolve_backend("auto", torch.device(args.device)),
            "rounds": args.rounds,
            "environment": environment(),
        }
        append_lines(args.json, [about, *found])


if __name__ == "__main__":
    main()
