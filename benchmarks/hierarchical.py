"""``python -m benchmarks.hierarchical``: hierarchical k-means beside flat, on features of images.

    python -m benchmarks.hierarchical --images FOLDER --features FILE [--rows 200000]
        [--clusters 2000 5000] [--rounds 1] [--json FILE]

FOLDER has a folder per class of 32 x 32 images, as CIFAR-10. Features are those of one layer of
random filters, after Coates, Lee and Ng (AISTATS 2011), and need no training: of each image four
random crops of 24 x 24, half of them flipped; their patches of 6 x 6 at every second place, brought
to mean 0 and variance 1, and whitened; products with 128 patches drawn from the images, both signs,
less 0.5, at least 0; means over quadrants; the 128 largest principal components of these 1,024
numbers, each over the root of its standard deviation; unit rows. FILE keeps them.

First come 10 iterations of four numbers of rows, with the line through them carried on to 10^9: an
extrapolation. Then flat takes 20 iterations, hierarchical 20, 10 and 5, in turns; seconds are those
that the processor spent on this one thread, which other processes disturb less than the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor

from solo_ext.clustering import Clustering, kmeans
from solo_ext.core.files import append_lines
from solo_ext.lab.training.run_dir import environment

CROPS, CROP, PATCH, FILTERS, WIDTH = 4, 24, 6, 128, 128
WAYS = {"flat, 20": ("torch", 20)}
WAYS |= {f"hierarchical, {steps}": ("hierarchical", steps) for steps in (20, 10, 5)}
SIZES = 8, 4, 2, 1
"""Parts of the rows that are clustered for the extrapolation."""


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """All images (n, 3, 32, 32), uint8, and their labels."""
    from torchvision.datasets import ImageFolder

    data = ImageFolder(str(folder))
    images = np.stack([np.asarray(image) for image, _ in data])
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor(data.targets)


def _level(patches: Tensor) -> Tensor:
    centred = patches - patches.mean(1, keepdim=True)
    return centred / (centred.var(1, keepdim=True) + 10).sqrt()


def features_of(x: Tensor) -> Tensor:
    """(4 n, 128) unit features, the first crops of all images before the second."""
    draw = torch.Generator().manual_seed(0)
    n, side = len(x), x.shape[-1]
    which = torch.randint(n, (20000,), generator=draw).tolist()
    top, left = (torch.randint(side - PATCH + 1, (20000,), generator=draw) for _ in range(2))
    places = zip(which, top.tolist(), left.tolist(), strict=True)
    drawn = [x[i, :, a : a + PATCH, b : b + PATCH] for i, a, b in places]
    patches = _level(torch.stack(drawn).float().flatten(1))
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(patches.T))
    whiten = vectors @ torch.diag((values + 0.1).rsqrt()) @ vectors.T
    filters = F.normalize((patches[:FILTERS] - mean) @ whiten, dim=1) @ whiten
    side_out = (CROP - PATCH) // 2 + 1
    pooled = []
    for _ in range(CROPS):
        for part in torch.split(x, 500):
            m = len(part)
            top, left = (torch.randint(side - CROP + 1, (m,), generator=draw) for _ in range(2))
            flip = torch.rand(m, generator=draw) < 0.5
            places = zip(part, top.tolist(), left.tolist(), strict=True)
            crops = torch.stack([i[:, a : a + CROP, b : b + CROP] for i, a, b in places]).float()
            crops = torch.where(flip[:, None, None, None], crops.flip(3), crops)
            patches = F.unfold(crops, PATCH, stride=2).transpose(1, 2).reshape(-1, 3 * PATCH**2)
            found = (_level(patches) - mean) @ filters.T
            found = found.view(m, side_out, side_out, FILTERS).permute(0, 3, 1, 2)
            signs = torch.cat([(found - 0.5).relu(), (-found - 0.5).relu()], 1)
            pooled.append(F.adaptive_avg_pool2d(signs, 2).flatten(1).half())
    h = torch.cat(pooled).float()
    h -= h.mean(0)
    values, vectors = torch.linalg.eigh((h.T @ h / len(h)).double())
    values, vectors = values.flip(0)[:WIDTH], vectors.flip(1)[:, :WIDTH]
    return F.normalize(h @ vectors.float() / values.float().sqrt().sqrt(), dim=1)


def timed(x: Tensor, count: int, backend: str, iterations: int) -> tuple[float, Clustering]:
    """Seconds of this process on a processor, and the clustering."""
    begin = time.process_time()
    found = kmeans(x, count, iterations=iterations, backend=backend)
    return time.process_time() - begin, found


def compared(x: Tensor, labels: Tensor, count: int, rounds: int) -> Iterator[dict[str, object]]:
    """Of each way in turn: seconds, objective and mutual information; ratios to the turn's flat."""
    for turn in range(rounds):
        flat = None
        for name, way in WAYS.items():
            seconds, found = timed(x, count, *way)
            flat = flat or (seconds, found.objective)
            yield {
                "rows": len(x),
                "clusters": count,
                "way": name,
                "turn": turn,
                "seconds": round(seconds, 2),
                "time over flat": round(seconds / flat[0], 4),
                "objective": round(found.objective, 5),
                "objective over flat": round(found.objective / flat[1], 4),
                "nmi": round(normalized_mutual_info_score(labels, found.assignments), 4),
            }


def carried_on(x: Tensor, count: int) -> dict[str, object]:
    """Seconds of four numbers of rows, and of 10^9 on the line through them."""
    rows = [len(x) // part for part in SIZES]
    seconds = [timed(x[torch.randperm(len(x))[:n]], count, "hierarchical", 10)[0] for n in rows]
    each, _ = np.polyfit(rows, seconds, 1)
    return {
        "rows": rows,
        "clusters": count,
        "seconds": [round(s, 2) for s in seconds],
        "microseconds of a row": round(1e6 * float(each), 1),
        "extrapolated hours of 10^9 rows": round(1e9 * float(each) / 3600, 1),
    }


def main() -> None:
    """Measures, prints and records line by line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--clusters", type=int, nargs="+", default=[2000, 5000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.features.exists():
        if args.images is None:
            parser.error(f"{args.features} does not exist: name a folder of --images")
        images, labels = read(args.images)
        torch.save((features_of(images), labels.repeat(CROPS)), args.features)
    features, labels = torch.load(args.features)
    x, labels = features[: args.rows], labels[: args.rows]
    about = {"features": "crops of CIFAR-10, random filters", "environment": environment()}
    found = (
        line
        for count in args.clusters
        for line in chain([carried_on(x, count)], compared(x, labels, count, args.rounds))
    )
    for line in chain([about], found):
        print(line, flush=True)
        if args.json:
            append_lines(args.json, [line])


if __name__ == "__main__":
    main()
