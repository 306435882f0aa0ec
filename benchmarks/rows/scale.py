"""What a process keeps of very many images, from made numbers.

Listing, labels, order, and the clusters and the bank of one of 512 processes, are made and used as
a run uses them, without the images; what lies on a GPU in a run is in the host's memory here. A
billion names take 20 GB of a folder for temporary files; where there is less room they are left
out. The file that ``solo-ext embed`` writes has a million rows.
"""

from __future__ import annotations

import json
import shutil
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

from benchmarks.record import Effort, Finding, Measured, at_most
from solo_ext.core import distributed
from solo_ext.core.draws import LARGE
from solo_ext.data.folders import ImageFiles, Listing
from solo_ext.data.loaders import labels_of
from solo_ext.data.views import EpochSampler, TrainingViews
from solo_ext.lab.evaluation.embed import _Columns
from solo_ext.lab.evaluation.parquet import PartsWriter
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.memory.features import FeatureBank

SIZES = (10**8, 10**9)
MOST_MB, MOST_SECONDS = 2000, 10
MOST_EMBED_MB, EMBED_ROWS, EMBED_DIM = 500, 10**6, 512
CLASS = 1_000_000
"""Images of a class."""
NAME = len("000/000000.jpg\0")
BATCH = 256
PROCESSES, OF_PROCESS = 512, 32
"""Those that share clusters and bank, and images of a batch that each of them has."""
COUNTS, DIM = (25_000, 50_000, 100_000), 128


class Step(NamedTuple):
    """One step of a start: seconds, and what the process grew at most, without mapped files."""

    seconds: float
    bytes: int


def own_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(x.split()[1]) << 10 for x in lines if x.startswith("RssAnon"))


def step(call: Callable[[], Any]) -> tuple[Step, Any]:
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
    return Step(seconds, max(most, own_bytes()) - before), result


def make_listing(folder: Path, images: int) -> None:
    """Writes the listing of made images as ``open_listing`` does: classes of a million each."""
    written = bytearray().join(b"000/%06d.jpg\0" % number for number in range(CLASS))
    names_of_class = np.frombuffer(written, dtype=np.uint8).reshape(CLASS, NAME)
    classes = [f"{number:03d}" for number in range(-(-images // CLASS))]
    with open(folder / "names", "wb") as names, open(folder / "targets", "wb") as targets:
        for target, name in enumerate(classes):
            count = min(images - target * CLASS, CLASS)
            names_of_class[:, :3] = np.frombuffer(name.encode(), dtype=np.uint8)
            names_of_class[:count].tofile(names)
            np.full(count, target, dtype=np.int32).tofile(targets)
    starts = np.append(np.arange(0, images, 64), images) * NAME
    starts.tofile(folder / "starts")
    about = {"count": images, "digest": "made", "classes": classes, "seen": {}}
    (folder / "about.json").write_text(json.dumps(about))


def first_paths(listing: Listing) -> int:
    """Reads the paths of the first batch of the last of 8 ranks."""
    sampler = EpochSampler(len(listing), 5, 8, 7)
    return sum(len(listing[key.sample][0]) for key in islice(sampler, BATCH))


def shared_out(images: int) -> dict[str, Step]:
    """Clusters and bank of the last process: made and filled, then used for a batch.

    The other processes are not there: what they would send is what this one sends itself.
    """
    samples = torch.randint(images, (OF_PROCESS,))

    def filled() -> tuple[ClusterPrototypes, FeatureBank]:
        clusters, bank = ClusterPrototypes(COUNTS, DIM), FeatureBank(DIM)
        bank.resize_(images)
        # Zeros alone would take no memory yet.
        bank.value.fill_(1)
        share = bank.filled.fill_(True).to(torch.int32)
        clusters.assignments = share.expand(len(COUNTS), -1).clone()
        return clusters, bank

    def batch() -> None:
        clusters.assignments_of(samples)
        keys = torch.ones(OF_PROCESS, DIM)
        bank.update_(distributed.gather(samples), distributed.gather(keys))

    dist.init_process_group("fake", rank=PROCESSES - 1, world_size=PROCESSES, store=FakeStore())
    try:
        made, (clusters, bank) = step(filled)
        return {"clusters and bank made": made, "clusters and bank of a batch": step(batch)[0]}
    finally:
        dist.destroy_process_group()


def start(images: int) -> Measured:
    """How a process starts, and what it keeps."""
    assert images > LARGE
    label = f"start with {images:,} images"
    most = at_most(MOST_SECONDS, "s"), at_most(MOST_MB, "MB")
    if shutil.disk_usage(tempfile.gettempdir()).free < 1.1 * images * (NAME + 4):
        note = f"needs {images * (NAME + 4) / 1e9:.0f} GB of {tempfile.gettempdir()}"
        return Measured([Finding(label, target, note=note) for target in most], {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_listing(folder, images)
        opened, listing = step(lambda: Listing.mapped(folder, "/data/"))
        views = TrainingViews(ImageFiles(listing))
        steps = {
            "listing opened": opened,
            "labels for the E-step": step(lambda: labels_of(views))[0],
            "paths of the first batch": step(lambda: first_paths(listing))[0],
            **shared_out(images),
        }
        seconds = sum(one.seconds for one in steps.values())
    grown = max(one.bytes for one in steps.values()) / 1e6
    findings = [Finding(label, t, n) for t, n in zip(most, (seconds, grown), strict=True)]
    return Measured(findings, {label: {name: one._asdict() for name, one in steps.items()}})


def embedded(rows: int) -> Measured:
    """Memory of writing as many made features as ``solo-ext embed`` does."""
    samples = ((f"photos/{i // 1000:04d}/{i:07d}.jpg", i % 100) for i in range(rows))
    draws = np.random.default_rng(0)

    def fill(folder: str) -> None:
        images = ImageFiles(Listing.of(samples, [f"class {c}" for c in range(100)]))
        columns, out = _Columns(images, EMBED_DIM, None), Path(folder, "made.parquet")
        with PartsWriter(out, "made", {}, columns.table, rows, columns.width) as writer:
            for first in range(0, rows, BATCH):
                indices = np.arange(first, min(first + BATCH, rows))
                writer.add(indices, draws.standard_normal((len(indices), EMBED_DIM), np.float32))
            assert writer.close().rows == rows

    with tempfile.TemporaryDirectory() as folder:
        found = step(lambda: fill(folder))[0]
    label, most = f"embed: memory for {rows:,} rows x {EMBED_DIM}", at_most(MOST_EMBED_MB, "MB")
    return Measured([Finding(label, most, found.bytes / 1e6)], {label: found._asdict()})


def measure(effort: Effort) -> Measured:
    """All sizes; with ``shrink`` the smallest that is mapped."""
    sizes = SIZES if effort.shrink == 1 else (2 * LARGE,)
    parts = [start(images) for images in sizes] + [embedded(effort.size(EMBED_ROWS))]
    details = {label: found for part in parts for label, found in part.details.items()}
    return Measured([f for part in parts for f in part.findings], details)
