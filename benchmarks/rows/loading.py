"""Ways to load and augment JPEG files, beside torchvision's workers.

All sources give two crops of MoCo v2's augmentation (crop, jitter, greyscale, blur, flip; also
without its blur) of the same images, which are cut to squares of 160 pixels first: augmentation on
the batch wants images of one size. One pass over all images each, by the clock on the wall; a pass
of DALI's includes the making of its pipeline, which is done in every epoch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Work, by_clock, ratio, summary, take_turns
from benchmarks.record import Effort, Finding, Measured
from benchmarks.trainers import write_folders
from solo_ext.config.compose import compose
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.dali import dali_installed
from solo_ext.data.loaders import pretrain_loader
from solo_ext.data.reading import decode_image, read_file
from solo_ext.data.transforms import FixedView
from solo_ext.data.views import HeldBatches, RawBatches
from solo_ext.host.dali_loader import DALILoader
from solo_ext.lab.training.prepare import prepare

IMAGES, BATCH, SQUARE, ROUNDS = 2048, 64, 160, 3
SIZES = (32, 64, 128)
AUGMENTATIONS = {"blur": 0.5, "no blur": 0.0}
BASE, AGAIN = "torchvision, 0 workers", "torchvision, 0 again"
_FILES, _DALI = "data.format=image_folder", "data.format=dali"
_BATCH = (_FILES, "data.augmentation=batch")
SOURCES = {
    BASE: (_FILES, "data.num_workers=0"),
    AGAIN: (_FILES, "data.num_workers=0"),
    "torchvision, 2 workers": (_FILES, "data.num_workers=2"),
    "dali cpu, 1 thread": (_DALI, "dali.device=cpu", "data.num_workers=1"),
    "dali cpu, 2 threads": (_DALI, "dali.device=cpu", "data.num_workers=2"),
    "dali gpu, 2 threads": (_DALI, "dali.device=gpu", "data.num_workers=2"),
    "batch, 0 workers": (*_BATCH, "data.num_workers=0"),
    "batch, 2 workers": (*_BATCH, "data.num_workers=2"),
    "batch, in memory": (*_BATCH, "data.in_memory=true"),
}
"""Overrides of the config by source."""


def sources(effort: Effort) -> list[str]:
    """Those that this machine has; with ``shrink`` none that starts processes."""
    found = []
    for name in SOURCES:
        dali = name.startswith("dali")
        here = not dali or (dali_installed() and ("gpu" not in name or effort.device == "cuda"))
        if here and (effort.shrink == 1 or (not dali and "2" not in name)):
            found.append(name)
    return found


def work(name: str, data: Path, size: int, blur: float, device: str) -> Work:
    """One pass over all images, every batch in memory when it ends."""
    words = [
        *(f"data.train_path={data}", "data.val_path=null", "data.fraction=-1"),
        *(f"augmentations.0.crop_size={size}", f"augmentations.0.gaussian_blur.prob={blur}"),
        *(f"optimizer.batch_size={BATCH}", "accelerator=auto", *SOURCES[name]),
        # No E-step is made, which few images would be too few for.
        "method_kwargs.num_prototypes=[1]",
    ]
    prepared = prepare(compose("imagenette/pcl", words))
    run = prepared.run
    loader = (DALILoader if run.data.format == "dali" else pretrain_loader)(run, prepared.train)
    batches: Any = loader
    if isinstance(loader.dataset, RawBatches):
        raw = loader.dataset
        if isinstance(raw, HeldBatches):
            raw.move(torch.device(device), always=False)
        augment = BatchAugment(run.data.dataset, run.augmentations, raw.height, raw.width, run.seed)
        augment = augment.to(device)

    def crops() -> Iterator[Any]:
        for batch in batches:
            yield augment(batch.images.to(device), augment.draw(batch.epoch, batch.asked.numpy()))

    def one_pass() -> None:
        for _ in crops() if isinstance(loader.dataset, RawBatches) else batches:
            pass
        if device == "cuda":
            torch.cuda.synchronize()

    return one_pass


def squares(data: Path, count: int, folder: Path) -> int:
    """About ``count`` images of all classes, cut to squares, in class folders; their number."""
    files = sorted(path for path in data.glob("*/*") if path.is_file())
    view = FixedView(SQUARE)
    chosen = files[:: max(len(files) // count, 1)]
    for path in chosen:
        out = folder / path.parent.name / f"{path.stem}.jpg"
        out.parent.mkdir(parents=True, exist_ok=True)
        view(decode_image(read_file(path), path.__str__)).save(out, quality=90)
    return len(chosen)


def measure(effort: Effort) -> Measured:
    """Races the sources at every size."""
    findings, details, count = [], {}, effort.size(IMAGES, least=5 * BATCH)
    names = sources(effort)
    # Minutes of a GPU are few.
    sizes = SIZES if effort.shrink == 1 and effort.device == "cpu" else SIZES[:1]
    with tempfile.TemporaryDirectory() as scratch:
        data, folder = effort.data or Path(scratch, "made"), Path(scratch, "squares")
        if effort.data is None:
            write_folders(data, count, SQUARE)
        count = squares(data, count, folder) // BATCH * BATCH
        for augmentation, blur in AUGMENTATIONS.items():
            for size in sizes:
                works = {n: work(n, folder, size, blur, effort.device) for n in names}
                rounds = min(effort.rounds, ROUNDS)
                seconds = take_turns(works, rounds, 1, by_clock(time.perf_counter))
                label, found = f"loading, {size} px, {augmentation}", summary(seconds, BASE)
                details[label] = {"images": count, "made": effort.data is None, **found}
                for name in (n for n in names if n not in (BASE, AGAIN)):
                    times = ratio(seconds, BASE, name)
                    rate = f"{1e3 * count / found[name]['ms']:,.0f} images/s"
                    line = Finding(label, None, times, ours=name, peer=BASE, note=rate)
                    findings.append(replace(line, again=ratio(seconds, AGAIN, BASE)))
    return Measured(findings, details)
