"""Time of the E-step's clustering, shared out to processes of one thread each.

    python -m benchmarks.e_step_ranks [--ranks 1 2] [--rows 100000] [--rounds 3] [--json FILE]

Unit rows around 2,000 directions, K = 250 + 500 + 1,000: a cold E-step, then a warm one. Groups of
processes take turns; each time is that of the slowest process, its median over the rounds. Cores
that processes have to share say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing

from solo_ext.clustering import e_step
from solo_ext.core.files import append_lines

WIDTH, DIRECTIONS, SIZES = 128, 2000, [250, 500, 1000]


def features(rows: int) -> Tensor:
    """(rows, 128), unit length."""
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(DIRECTIONS, WIDTH, generator=generator), dim=1)
    spread = 0.1 * torch.randn(rows, WIDTH, generator=generator)
    return F.normalize(centres[torch.arange(rows) % DIRECTIONS] + spread, dim=1)


def work(rank: int, ranks: int, rows: int, folder: str) -> None:
    """What each process does; it leaves its two times in the folder."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    ids = torch.arange(rank, rows, ranks)
    own = features(rows)[ids]
    init: list[Tensor] | None = None
    seconds = []
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        found = e_step(own, ids, rows, SIZES, temperature=0.2, init=init)
        seconds.append(time.perf_counter() - begin)
        init = [granularity.means for granularity in found]
    Path(folder, f"{rank}.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measured(ranks: int, rows: int) -> tuple[float, float]:
    """Seconds of the cold and of the warm E-step, of the slowest process."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (ranks, rows, folder), nprocs=ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    cold, warm = zip(*found, strict=True)
    return max(cold), max(warm)


def main() -> None:
    """Measures and prints."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds = [{n: measured(n, args.rows) for n in args.ranks} for _ in range(args.rounds)]
    found = []
    for ranks in args.ranks:
        cold, warm = (statistics.median(r[ranks][i] for r in rounds) for i in range(2))
        found.append({"ranks": ranks, "cold": round(cold, 3), "warm": round(warm, 3)})
        print(f"{ranks} processes  cold {cold:8.2f} s  warm {warm:8.2f} s")
    if args.json:
        about = {"rows": args.rows, "rounds": args.rounds, "cores": os.cpu_count()}
        append_lines(args.json, [about, *found])


if __name__ == "__main__":
    main()
