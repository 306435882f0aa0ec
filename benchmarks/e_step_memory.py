"""Memory, time and objective of the E-step: features in memory or on disk, all or a sample.

    python -m benchmarks.e_step_memory [--rows 250000 1000000] [--width 128] [--json FILE]

Each line is a fresh process that writes unit rows around 2,000 directions part by part, as the
network would, and then clusters them. Numbers are in MB (10^6 bytes): the peak of what is resident
and of what of it is anonymous, less what was before the features; ``file`` is the largest part of
it that belongs to mapped files, which the system takes back when it needs memory. ``objective`` is
the mean squared distance of all rows to their means.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from solo_ext.clustering import FeatureFile, e_step

PART, DIRECTIONS, MB = 8192, 2000, 1e6


def resident() -> dict[str, int]:
    """Bytes of this process in memory: all, anonymous ones, those of mapped files."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile"):
            found[name] = 1024 * int(rest.split()[0])
    return found


class Peaks:
    """Largest values of :func:`resident`, looked at a hundred times a second."""

    def __init__(self) -> None:
        self.first = self.most = resident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.01):
            self.most = {key: max(value, self.most[key]) for key, value in resident().items()}

    def done(self) -> dict[str, int]:
        """Growth since the start, in MB."""
        self._end.set()
        self._thread.join()
        return {key: round((self.most[key] - self.first[key]) / MB) for key in self.most}


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One case, in a process of its own."""
    (rows,), generator = args.rows, torch.Generator().manual_seed(0)
    centres = torch.randn(DIRECTIONS, args.width, generator=generator)
    ids = torch.arange(rows)
    # What the first call of everything takes is not what grows.
    warm = torch.randn(4096, args.width, generator=generator)
    e_step(warm, torch.arange(4096), 4096, [min(args.clusters)], temperature=0.2, iterations=2)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        peaks = Peaks()
        table: Any = (
            FeatureFile(Path(folder), rows, args.width)
            if args.place == "disk"
            else torch.zeros(rows, args.width)
        )
        for own in torch.split(ids, PART):
            made = centres[torch.randint(DIRECTIONS, (len(own),), generator=generator)]
            made = made + 0.7 * torch.randn(made.shape, generator=generator)
            table[own] = F.normalize(made, dim=1)
        begin, busy = time.perf_counter(), time.process_time()
        found = e_step(
            table,
            ids,
            rows,
            args.clusters,
            temperature=0.2,
            iterations=args.iterations,
            sample=args.sample or None,
        )
        seconds = time.perf_counter() - begin, time.process_time() - busy
        grown = peaks.done()
    return {
        "rows": rows,
        "features": args.place,
        "sample": args.sample or "all",
        "table": round(4 * rows * args.width / MB),
        "resident": grown["VmRSS"],
        "anonymous": grown["RssAnon"],
        "file": grown["RssFile"],
        "seconds": round(seconds[0], 1),
        "CPU seconds": round(seconds[1], 1),
        "objective": [round(g.objective, 5) for g in found],
    }


def main() -> None:
    """Measures all cases, prints a table, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--clusters", type=int, nargs="+", default=[100])
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--samples", type=int, nargs="+", default=[0, 50_000], help="0 is all")
    parser.add_argument("--folder", help="where the features lie on disk; a temporary one else")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--place", choices=("memory", "disk"), help=argparse.SUPPRESS)
    parser.add_argument("--sample", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.place:
        print(json.dumps(work(args)))
        return
    own = [*("--width", args.width, "--iterations", args.iterations, "--clusters", *args.clusters)]
    own += ["--folder", args.folder] if args.folder else []
    lines: list[dict[str, Any]] = []
    for rows in args.rows:
        for sample in args.samples:
            for place in ("memory", "disk"):
                case = ["--rows", rows, "--sample", sample, "--place", place]
                words = [sys.executable, __file__, *map(str, [*own, *case])]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                lines.append(json.loads(done.stdout))
                if len(lines) == 1:
                    print(f"| {' | '.join(lines[0])} |\n{'|---' * len(lines[0])}|")
                print(f"| {' | '.join(map(str, lines[-1].values()))} |", flush=True)
    if args.json:
        from solo_ext import host
        from solo_ext.core.files import append_lines
        from solo_ext.lab.training.run_dir import environment

        about = {"unit": "MB", "environment": environment(host.load().info)}
        append_lines(args.json, [about, *lines])


if __name__ == "__main__":
    main()
