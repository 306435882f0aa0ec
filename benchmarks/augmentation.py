"""Views per second and core of the augmentation on the batch beside torchvision's per image.

    python benchmarks/augmentation.py IMAGES --out benchmark_results/augmentation [--rounds 20]

IMAGES is a folder with at least 2,000 JPEGs in it or below it. They are decoded once, cut to their
central square and scaled to the side of the case; timed is what comes after: from PIL images or
uint8 tensors in memory to normalised float crops, with the shipped augmentations. All sources take
the same 256 images in every round, on one thread, in turn; time is that of the process on its core.
The ratio is that of the median round; `again` is torchvision a second time (what equals differ by).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from interleaved import Work, race
from PIL import Image, ImageOps

from solo_ext.config.schema import Augmentation
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.transforms import pretrain_transform

AUGMENTATIONS = Path(__file__).parents[1] / "configs" / "solo_ext" / "augmentations"
LEAST_IMAGES, BATCH = 2000, 256
CASES = (
    (32, "cifar", 32),
    (32, "small32", 32),
    (64, "mocov2_128", 64),
    (96, "small32", 32),
    (128, "mocov2_128", 128),
)
"""Side of the images, name of the augmentations, side of the crops."""

Pipelines = Sequence[Mapping[str, Any]]


def torchvision_images(images: list[Image.Image], pipelines: Pipelines) -> Work:
    """torchvision's transforms, image by image, collated."""
    transform = pretrain_transform("custom", pipelines)
    batches = Batches(len(images))

    def work() -> list[torch.Tensor]:
        views = [transform(images[i]) for i in batches()]
        return [torch.stack(crops) for crops in zip(*views, strict=True)]

    return work


def on_the_batch(images: list[Image.Image], pipelines: Pipelines) -> Work:
    """Drawn and computed for the batch."""
    pixels = torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2)
    pixels = pixels.contiguous()
    augment = BatchAugment("custom", pipelines, *pixels.shape[2:], 5)
    batches = Batches(len(images))

    def work() -> list[torch.Tensor]:
        samples = batches()
        return augment(pixels[samples], augment.draw(0, samples))

    return work


class Batches:
    """The next images at every call, in the same order for every source."""

    def __init__(self, count: int) -> None:
        self.count, self.next = count, 0

    def __call__(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        first, self.next = self.next, self.next + BATCH
        return np.arange(first, self.next) % self.count


SOURCES: dict[str, Callable[[list[Image.Image], Pipelines], Work]] = {
    "torchvision": torchvision_images,
    "again": torchvision_images,
    "batch": on_the_batch,
}


def measure(files: list[Path], case: tuple[int, str, int], rounds: int) -> dict[str, Any]:
    """Views per second and core of every source, and their ratios to the first."""
    side, name, size = case
    entries = yaml.safe_load((AUGMENTATIONS / f"{name}.yaml").read_text())
    pipelines = [{**Augmentation(**e).model_dump(), "crop_size": size} for e in entries]
    views = BATCH * sum(p["num_crops"] for p in pipelines)
    images = [ImageOps.fit(Image.open(f).convert("RGB"), (side, side)) for f in files]
    work = {source: make(images, pipelines) for source, make in SOURCES.items()}
    found: dict[str, Any] = {}
    for source, row in race(work, rounds, warm=2, clock=time.process_time).items():
        rate = 1e3 * views / row["ms"]  # type: ignore[operator]
        times = 1 / row["ratio"]  # type: ignore[operator]
        low, high = (1 / q for q in reversed(row["quartiles"]))  # type: ignore[arg-type]
        found[source] = {"views_per_second": rate, "times": times, "quartiles": [low, high]}
        print(
            f"  {source:12} {rate:9.0f} views/s  {times:6.2f} x ({low:.2f} to {high:.2f})",
            flush=True,
        )
    return found


def main() -> None:
    """Prints a table per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = sorted(p for p in args.images.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if len(files) < LEAST_IMAGES:
        parser.error(f"{args.images} has {len(files)} JPEGs; give {LEAST_IMAGES} or more")
    # Of all classes: a folder is sorted by them.
    files = files[:: len(files) // LEAST_IMAGES][:LEAST_IMAGES]
    record: dict[str, Any] = {"images": len(files), "batch": BATCH, "rounds": args.rounds}
    for case in CASES:
        label = f"{case[0]} px, {case[1]}, crops of {case[2]} px"
        print(label, flush=True)
        record[label] = measure(files, case, args.rounds)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "augmentation.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
