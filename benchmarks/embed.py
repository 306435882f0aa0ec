"""Speed of ``solo-ext embed`` beside a plain loop of PyTorch, and its memory for many images.

    python -m benchmarks.embed --data FOLDER --json results/speed/embed.jsonl
    python -m benchmarks.embed --memory 1000000 --dim 512

The first compares one pass over the images of FOLDER (any depth; without it images are made):
a loop of six lines that keeps the features in memory, and ``embed``, which lists the images, runs
the same network on the same loader and writes the file. Both take turns in one process; the loop
comes twice, which says how much of a ratio is noise. `--process-time` takes the time that the
processors spend on this process, with its threads but without workers: a busy machine disturbs it
less than the clock on the wall. Add a network by an entry of `NETWORKS`.

The second writes made features of as many images by the command's own writer, and reports the
largest memory of the process: its own, and with the files of libraries that it maps, such as
torch's. ``--check`` fails if its own is 1 GB or more, or a speed is below 0.9 of the loop's.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.interleaved import Clock, by_clock, summary, take_turns
from benchmarks.scale import measure, own_bytes
from benchmarks.speed.turns import write_folders
from solo_ext.core.files import append_lines
from solo_ext.data.folders import ImageFiles, Listing
from solo_ext.data.loaders import fixed_loader
from solo_ext.lab.evaluation.embed import EmbedRun, _Columns, _images_of, _opened, embed
from solo_ext.lab.evaluation.parquet import PartsWriter
from solo_ext.lab.training.run_dir import environment

BATCH = 64
LEAST_SPEED, MOST_BYTES = 0.9, 1e9
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    # Nothing but reading, decoding and writing; as many features as usual networks have.
    "pixels of 16 x 16": ("pixels", {"crop_size": 16}),
    "ResNet-18, 64 px": ("timm/resnet18", {"crop_size": 64, "pretrained": False}),
    "ViT-Ti/16, 224 px": ("timm/vit_tiny_patch16_224", {"pretrained": False}),
}
"""Model and settings by name."""


@torch.no_grad()
def plain_loop(backbone: torch.nn.Module, loader: Any, device: str) -> Tensor:
    """Features of all images, as a script of one's own computes them."""
    backbone.eval().to(device)
    rows = []
    for images, _ in loader:
        rows.append(backbone(images.to(device)).cpu())
    return torch.cat(rows)


def race(
    name: str, data: Path, workers: int, rounds: int, device: str, clock: Clock
) -> list[dict[str, Any]]:
    """One pass over all images each way; prints and returns what was found."""
    model, given = NETWORKS[name]
    settings = {**given, "batch_size": BATCH, "num_workers": workers, "device": device}
    opened, cfg = _opened(model, EmbedRun(**settings), [data])
    images = _images_of([data])
    loader = fixed_loader(cfg, images, batch_size=BATCH)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "features.parquet")

        def write() -> None:
            out.unlink(missing_ok=True)
            embed(opened, data, out, settings)

        def loop() -> None:
            plain_loop(opened.backbone, loader, device)

        ways = {"plain loop": loop, "plain loop again": loop, "embed": write}
        seconds = take_turns(ways, rounds, warm=1, timer=by_clock(clock))
        found = summary(seconds, "plain loop")
    print(f"{name}, {len(images)} images, {workers} workers, {device}", flush=True)
    rows = []
    for way, row in found.items():
        rate, speed = len(images) / row["ms"] * 1e3, 1 / row["ratio"]
        # Of speed, not of time: higher is faster.
        low, high = (1 / q for q in reversed(row["quartiles"]))
        print(f"  {way:18} {rate:8.0f} images/s {speed:6.2f} x ({low:.2f} to {high:.2f})")
        rows.append(
            {
                "network": name,
                "workers": workers,
                "device": device,
                "way": way,
                "images": len(images),
                "images_per_second": rate,
                "speed_ratio": speed,
                "quartiles": [low, high],
            }
        )
    return rows


def fill(count: int, dim: int, folder: Path) -> dict[str, Any]:
    """Writes a file of made features; returns its size, the time and the memory of the process."""
    begin, before = time.monotonic(), own_bytes()
    grown, file = measure("", lambda: _fill(count, dim, folder))
    scale = 1 if sys.platform == "darwin" else 1024
    found = {
        "rows": count,
        "dim": dim,
        "file_bytes": file.stat().st_size,
        "seconds": time.monotonic() - begin,
        "own_bytes_before": before,
        "own_bytes": before + grown.bytes,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
    }
    own, first, resident = (
        f"{found[key] / 1e6:.0f} MB" for key in ("own_bytes", "own_bytes_before", "resident_bytes")
    )
    print(
        f"{count:,} rows x {dim}: {own} own memory at most, of which {first} after the imports; "
        f"{resident} with the files of libraries; {found['file_bytes'] / 1e9:.2f} GB written in "
        f"{found['seconds']:.0f} s"
    )
    return found


def _fill(count: int, dim: int, folder: Path) -> Path:
    samples = ((f"photos/{i // 1000:04d}/{i:07d}.jpg", i % 100) for i in range(count))
    images = ImageFiles(Listing.of(samples, [f"class {c}" for c in range(100)]))
    columns = _Columns(images, dim, None)
    out, draws = folder / "made.parquet", np.random.default_rng(0)
    with PartsWriter(out, "made", {}, columns.table, count, columns.width) as writer:
        for start in range(0, count, BATCH):
            indices = np.arange(start, min(start + BATCH, count))
            writer.add(indices, draws.standard_normal((len(indices), dim), np.float32))
        assert writer.close().rows == count
    return out


def main() -> None:
    """Races the ways with every network, or measures memory; prints and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of images, of any depth")
    parser.add_argument("--json", type=Path, help="file of the record, to which lines are added")
    parser.add_argument("--images", type=int, default=1024, help="as many are made without --data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--process-time", action="store_true", help="not the time on the wall")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--memory", type=int, metavar="ROWS", help="memory of as many rows instead")
    parser.add_argument("--dim", type=int, default=512, help="features of a row, with --memory")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a target is missed")
    parser.add_argument("--note", default="", help="what else the machine did; kept in the record")
    args = parser.parse_args()
    clock = time.process_time if args.process_time else time.perf_counter
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        if args.memory:
            rows = [fill(args.memory, args.dim, Path(scratch))]
            missed = [row for row in rows if row["own_bytes"] >= MOST_BYTES]
        else:
            data = args.data or Path(scratch, "made")
            if args.data is None:
                write_folders(data, args.images, 160)
            rows = [
                row
                for name in args.networks
                for workers in args.workers
                for row in race(name, data, workers, args.rounds, device, clock)
            ]
            missed = [r for r in rows if r["way"] == "embed" and r["speed_ratio"] < LEAST_SPEED]
    if args.json:
        about = {
            "batch_size": BATCH,
            "rounds": args.rounds,
            "clock": clock.__name__,
            "load_average": os.getloadavg(),
            "note": args.note,
            "environment": environment(),
        }
        append_lines(args.json, [about, *rows])
    if args.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
