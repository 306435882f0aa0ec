"""Images per second of the ways to load and augment JPEG files: torchvision, DALI, on the batch.

    python -m benchmarks.loading --data FOLDER --json results/speed/loading.jsonl

FOLDER holds class folders, for example Imagenette-160's `train`; without it images are made. They
are first cut to squares of 160 pixels, since augmentation on the batch wants images of one size.
All sources give two crops of MoCo v2's augmentation (crop, jitter, greyscale, blur, flip; also
without its blur) at 32, 64 and 128 pixels, of the same images, and take turns in one process: one
pass over all images each, in rounds. A pass of DALI's includes the making of its pipeline, which is
done in every epoch.
Ratios are of the same round, relative to the first source; the first comes twice, which says how
much of a ratio is noise. Add a source by an entry of `SOURCES`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.interleaved import summary, take_turns
from benchmarks.speed.turns import write_folders
from solo_ext.config.compose import compose
from solo_ext.core.files import append_lines
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.dali import dali_installed
from solo_ext.data.loaders import pretrain_loader
from solo_ext.data.reading import decode_image, read_file
from solo_ext.data.transforms import FixedView
from solo_ext.data.views import HeldBatches, RawBatches
from solo_ext.host.dali_loader import DALILoader
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.run_dir import environment

BATCH = 64
SQUARE = 160
SIZES = (32, 64, 128)
AUGMENTATIONS = {"blur": 0.5, "no blur": 0.0}


def read_all(loader: Any) -> None:
    """One pass, every batch in memory when it ends."""
    for _ in loader:
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Source:
    """A way to load: overrides of the config, and whether this machine can."""

    overrides: tuple[str, ...]
    there: Callable[[], bool] = lambda: True


def _dali_on_gpu() -> bool:
    return dali_installed() and torch.cuda.is_available()


_TORCHVISION = "data.format=image_folder"
_DALI = ("data.format=dali", "dali.device=cpu")
_BATCH = (_TORCHVISION, "data.augmentation=batch")
SOURCES = {
    "torchvision, 0 workers": Source((_TORCHVISION, "data.num_workers=0")),
    "torchvision, 0 again": Source((_TORCHVISION, "data.num_workers=0")),
    "torchvision, 2 workers": Source((_TORCHVISION, "data.num_workers=2")),
    "dali cpu, 1 thread": Source((*_DALI, "data.num_workers=1"), dali_installed),
    "dali cpu, 2 threads": Source((*_DALI, "data.num_workers=2"), dali_installed),
    "batch, 0 workers": Source((*_BATCH, "data.num_workers=0")),
    "batch, 2 workers": Source((*_BATCH, "data.num_workers=2")),
    "batch, in memory": Source((*_BATCH, "data.in_memory=true")),
    "dali gpu, 2 threads": Source(
        ("data.format=dali", "dali.device=gpu", "data.num_workers=2"), _dali_on_gpu
    ),
}


def work(source: Source, data: Path, size: int, blur: float) -> Any:
    """Number of images of a pass, and a function that makes one."""
    prepared = prepare(
        compose(
            "imagenette/pcl",
            [
                f"data.train_path={data}",
                "data.val_path=null",
                "data.fraction=-1",
                f"augmentations.0.crop_size={size}",
                f"augmentations.0.gaussian_blur.prob={blur}",
                f"optimizer.batch_size={BATCH}",
                "accelerator=auto",
                *source.overrides,
            ],
        )
    )
    make = DALILoader if prepared.run.data.format == "dali" else pretrain_loader
    loader = make(prepared.run, prepared.train)
    if isinstance(loader.dataset, RawBatches):
        run, raw = prepared.run, loader.dataset
        if isinstance(raw, HeldBatches):
            raw.move(torch.device("cuda" if torch.cuda.is_available() else "cpu"), always=False)
        augment = BatchAugment(run.data.dataset, run.augmentations, raw.height, raw.width, run.seed)
        return len(loader) * BATCH, lambda: read_all(augmented(loader, augment))
    return len(loader) * BATCH, lambda: read_all(loader)


def augmented(loader: Any, augment: BatchAugment) -> Iterator[Any]:
    """Crops of every batch, on the device that would train."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    augment = augment.to(device)
    for batch in loader:
        yield augment(batch.images.to(device), augment.draw(batch.epoch, batch.asked.numpy()))


def squares(data: Path, count: int, folder: Path) -> None:
    """About ``count`` images of all classes, cut to squares, in class folders."""
    files = sorted(path for path in data.glob("*/*") if path.is_file())
    view = FixedView(SQUARE)
    for path in files[:: max(len(files) // count, 1)]:
        out = folder / path.parent.name / f"{path.stem}.jpg"
        out.parent.mkdir(parents=True, exist_ok=True)
        view(decode_image(read_file(path), path.__str__)).save(out, quality=90)


def main() -> None:
    """Races the sources at every size, and prints and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="class folders of JPEG files")
    parser.add_argument("--json", type=Path, help="file of the record, to which lines are added")
    parser.add_argument("--images", type=int, default=2048, help="about as many a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    every = "these alone; all that this machine has if left out"
    parser.add_argument("--sources", nargs="+", choices=SOURCES, help=every)
    parser.add_argument("--note", default="", help="what else the machine did; kept in the record")
    args = parser.parse_args()
    there = [key for key, source in SOURCES.items() if source.there()]
    sources = args.sources or there
    if absent := [key for key in sources if key not in there]:
        parser.error(
            f"--sources: {', '.join(absent)}: not here: DALI is not installed, or torch sees no GPU"
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        data, folder = args.data or Path(scratch, "made"), Path(scratch, "squares")
        if args.data is None:
            write_folders(data, args.images, SQUARE)
        squares(data, args.images, folder)
        if args.json:
            about = {
                "images": sum(1 for _ in folder.glob("*/*")),
                "made": args.data is None,
                "batch_size": BATCH,
                "rounds": args.rounds,
                "load_average": os.getloadavg(),
                "note": args.note,
                "environment": environment(),
            }
            append_lines(args.json, [about])
        for name, blur in AUGMENTATIONS.items():
            for size in args.sizes:
                rows = compare(folder, sources, size, name, blur, args.rounds)
                if args.json:
                    append_lines(args.json, rows)


def compare(
    data: Path, sources: Sequence[str], size: int, name: str, blur: float, rounds: int
) -> list[dict[str, Any]]:
    """Races the sources at a size; prints and returns what was found."""
    made = {key: work(SOURCES[key], data, size, blur) for key in sources}
    seconds = take_turns({key: run for key, (_, run) in made.items()}, rounds, warm=1)
    found = summary(seconds, next(iter(made)))
    images = next(iter(made.values()))[0]
    print(f"{size} px, {name}, {images} images, two crops", flush=True)
    rows = []
    for key, row in found.items():
        rate = images / row["ms"] * 1e3  # type: ignore[operator]
        # Of speed, not of time: higher is faster.
        low, high = (1 / q for q in reversed(row["quartiles"]))  # type: ignore[arg-type]
        speed = 1 / row["ratio"]  # type: ignore[operator]
        print(f"  {key:24} {rate:8.0f} images/s {speed:6.2f} x ({low:.2f} to {high:.2f})")
        rows.append(
            {
                "size": size,
                "augmentation": name,
                "source": key,
                "images": images,
                "images_per_second": rate,
                "speed_ratio": speed,
                "quartiles": [low, high],
            }
        )
    return rows


if __name__ == "__main__":
    main()
