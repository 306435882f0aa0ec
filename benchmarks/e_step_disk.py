"""Time of an E-step whose features lie in a file, beside the same in memory.

    python -m benchmarks.e_step_disk FOLDER [--rows 1000000] [--clusters 1000] [--iterations 5]
        [--backends torch hierarchical] [--rounds 3] [--alone]

Unit rows x 128 in a file of the folder that has no name, on one thread. Memory and file take turns;
each figure is the median over the rounds: seconds of the clock, seconds that the processor worked,
and bytes that came from the disk, which are none as long as the system keeps the file in memory it
has no other use for. ``--alone`` leaves the copy in memory out, for files larger than that.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering import e_step

WIDTH, DIRECTIONS, AT_ONCE = 128, 2000, 100_000


def in_file(rows: int, folder: Path) -> Tensor:
    """(rows, 128), unit rows around 2,000 directions, made part by part.

    After a million rows they come again, their columns rotated.
    """
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(DIRECTIONS, WIDTH, generator=generator), dim=1)
    with tempfile.TemporaryFile(dir=folder) as file:
        x = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(rows, WIDTH)))
    for number, part in enumerate(torch.split(x, AT_ONCE)):
        if number >= 10:
            part.copy_(x[number % 10 * AT_ONCE :][: len(part)].roll(number // 10, 1))
            continue
        chosen = torch.randint(DIRECTIONS, (len(part),), generator=generator)
        spread = 0.1 * torch.randn(len(part), WIDTH, generator=generator)
        part.copy_(F.normalize(centres[chosen] + spread, dim=1))
    return x


def from_disk() -> int:
    """Bytes that this process had the system read."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def measured(x: Tensor, args: argparse.Namespace, backend: str) -> tuple[float, float, float, str]:
    """Seconds of clock and processor, GB from the disk, and the objective."""
    begin = time.monotonic(), time.process_time(), from_disk()
    ids = torch.arange(len(x))
    options = {"iterations": args.iterations, "backend": backend}
    (found,) = e_step(x, ids, [args.clusters], temperature=0.2, **options)
    read = (from_disk() - begin[2]) / 1e9
    clock, worked = time.monotonic() - begin[0], time.process_time() - begin[1]
    return clock, worked, read, repr(found.objective)


def main() -> None:
    """Measures and prints."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=["torch", "hierarchical"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"{args.folder}: no folder; name one on the disk to measure")
    torch.set_num_threads(1)
    features = {"file": in_file(args.rows, args.folder)}
    if not args.alone:
        features["memory"] = features["file"].clone()
    for backend in args.backends:
        turns: dict[str, list[tuple[float, float, float, str]]] = {name: [] for name in features}
        for _ in range(args.rounds):
            for name, x in features.items():
                turns[name].append(measured(x, args, backend))
        for name, found in turns.items():
            clock, worked, read = (statistics.median(t[i] for t in found) for i in range(3))
            print(
                f"{backend:13} {name:7} clock {clock:7.1f} s  processor {worked:7.1f} s  "
                f"from disk {read:6.2f} GB  objective {', '.join(sorted({t[3] for t in found}))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
