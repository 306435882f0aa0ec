"""``python -m benchmarks.scale``: what a process keeps of a billion images, from made numbers.

Listing, labels, order, and the clusters and the bank of one of 512 processes, are made and used as
a run uses them, without the images; what lies on a GPU in a run is in the host's memory here.
``--check`` fails if a process's own memory exceeds 2 GB, or its start ten seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from solo_ext.core import distributed
from solo_ext.core.draws import LARGE
from solo_ext.data.folders import ImageFiles, Listing
from solo_ext.data.loaders import labels_of
from solo_ext.data.views import EpochSampler, TrainingViews
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank

MOST_BYTES, MOST_SECONDS = 2e9, 10.0
CLASS = 1_000_000
"""Images of a class."""
NAME = len("000/000000.jpg\0")
BATCH, BATCHES = 256, 100
PROCESSES, OF_PROCESS = 512, 32
"""Those that share clusters and bank, and images of a batch that each of them has."""
COUNTS, DIM = (25_000, 50_000, 100_000), 128


class Measured(NamedTuple):
    """One step of a start.

    Attributes:
        name: what was done.
        seconds: how long it took.
        bytes: largest growth of the process's own memory, without files that it maps.
    """

    name: str
    seconds: float
    bytes: int


def own_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(x.split()[1]) << 10 for x in lines if x.startswith("RssAnon"))


def measure(name: str, call: Callable[[], Any]) -> tuple[Measured, Any]:
    """Time of a call, and how much this process grew in it at most."""
    ended = threading.Event()
    before = most = own_bytes()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.02):
            most = max(most, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    try:
        result = call()
    finally:
        seconds = time.perf_counter() - begin
        ended.set()
        watcher.join()
    return Measured(name, seconds, max(most, own_bytes()) - before), result


def make_listing(folder: Path, images: int) -> None:
    """Writes the listing of made images as ``open_listing`` does: classes of a million each."""
    written = np.empty((CLASS, NAME), dtype=np.uint8)
    written[:] = np.frombuffer(b"000/000000.jpg\0", dtype=np.uint8)
    rest = np.arange(CLASS)
    for place in range(9, 3, -1):
        rest, digit = np.divmod(rest, 10)
        written[:, place] += digit.astype(np.uint8)
    classes = [f"{number:03d}" for number in range(-(-images // CLASS))]
    with open(folder / "names", "wb") as names, open(folder / "targets", "wb") as targets:
        for target, name in enumerate(classes):
            count = min(images - target * CLASS, CLASS)
            written[:, :3] = np.frombuffer(name.encode(), dtype=np.uint8)
            written[:count].tofile(names)
            np.full(count, target, dtype=np.int32).tofile(targets)
    starts = np.append(np.arange(0, images, 64), images) * NAME
    starts.tofile(folder / "starts")
    about = {"count": images, "digest": "made", "classes": classes, "seen": {}}
    (folder / "about.json").write_text(json.dumps(about))


def start(folder: Path, images: int) -> list[Measured]:
    """Opens a listing, and reads the labels and the paths of the first batch of one of 8 ranks."""
    opened, listing = measure("listing opened", lambda: Listing.mapped(folder, "/data/"))
    assert len(listing) == images
    views = TrainingViews(ImageFiles(listing))
    labels, _ = measure("labels for the E-step", lambda: labels_of(views))
    return [opened, labels, served(listing, 0, 1)]


def served(listing: Listing, first: int, batches: int) -> Measured:
    """Reads the paths of batches of the last of 8 ranks, from the batch ``first`` on."""
    sampler = EpochSampler(len(listing), 5, 8, 7)
    sampler.start = first * BATCH
    paths = (listing[key.sample][0] for key in islice(sampler, batches * BATCH))
    name = f"batch {first:,}" if batches == 1 else f"batches {first:,} to {first + batches - 1:,}"
    return measure(f"paths of {name}", lambda: sum(map(len, paths)))[0]


def shared_out(images: int) -> list[Measured]:
    """Clusters and bank of the last process: made and filled, then used for a batch.

    The other processes are not there: what they would send is what this one sends itself.
    """
    dist.init_process_group("fake", rank=PROCESSES - 1, world_size=PROCESSES, store=FakeStore())
    try:
        made, (clusters, bank) = measure("clusters and bank made", lambda: _state(images))
        samples = torch.randint(images, (OF_PROCESS,))

        def batch() -> None:
            clusters.assignments_of(samples)
            keys = torch.ones(OF_PROCESS, DIM)
            bank.update_(distributed.gather(samples), distributed.gather(keys))

        return [made, measure("clusters and bank of a batch", batch)[0]]
    finally:
        dist.destroy_process_group()


def _state(images: int) -> tuple[ClusterPrototypes, FeatureBank]:
    clusters, bank = ClusterPrototypes(COUNTS, DIM), FeatureBank(DIM)
    bank.resize_(images)
    # Zeros alone would take no memory yet.
    bank.value.fill_(1)
    share = bank.filled.fill_(True).to(torch.int32)
    clusters.assignments = share.expand(len(COUNTS), -1).clone()
    return clusters, bank


def main() -> int:
    """Makes, measures, prints, and removes what was made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--images", type=int, default=10**9)
    parser.add_argument("--folder", help="scratch folder for 19 bytes per image")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not LARGE < args.images <= 1000 * CLASS:
        print(f"--images={args.images}: from {LARGE + 1} to {1000 * CLASS}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        made, _ = measure("listing made", lambda: make_listing(folder, args.images))
        size = sum(file.stat().st_size for file in folder.iterdir())
        found = start(folder, args.images) + shared_out(args.images)
        listing, last = Listing.mapped(folder, "/data/"), args.images // 8 // BATCH - BATCHES
        later = [served(listing, place, BATCHES) for place in (1, last)]
    print(f"{args.images:,} images; files that processes share: {size / 1e9:.2f} GB")
    for one in (made, *found, *later):
        print(f"{one.name:42} {one.seconds:8.2f} s {one.bytes / 1e6:10.1f} MB")
    seconds, most = sum(one.seconds for one in found), max(one.bytes for one in (*found, *later))
    fine = seconds <= MOST_SECONDS and most <= MOST_BYTES
    print(
        f"start {seconds:.2f} s, {most / 1e6:.1f} MB of a process: {'fine' if fine else 'too much'}"
    )
    return 1 if args.check and not fine else 0


if __name__ == "__main__":
    sys.exit(main())
