"""Peak memory of evaluation and of PCL's E-step as the data set grows.

    python -m benchmarks.evaluation_memory DATA [--json FILE] [--sizes 5000 20000 50000]

DATA holds class folders of images in ``train`` and ``test``, such as CIFAR-10's as JPEGs; parts of
it are linked into a temporary folder. Each number is the peak resident memory of a fresh process,
in MB (10^6 bytes). ``grown`` is the peak less that of the smallest size, ``features`` what their
features and targets differ by, ``list`` what the lists of files take, ``beyond`` the rest, and
``per image`` the rest by image. Evaluation reads raw pixels of 32 x 32 (3,072 dimensions) of all
training images and 1,000 test images; the E-step embeds all training images into 1,024 dimensions
before the first of two steps of training.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TEST_IMAGES, PIXELS, EMBEDDING = 1000, 3 * 32 * 32, 1024
TASKS = ("knn", "retrieval", "e_step")
MB = 1e6


def linked(source: Path, count: int, place: Path) -> Path:
    """``count`` images of class folders, evenly over the classes, as links."""
    classes = sorted(p for p in source.iterdir() if p.is_dir())
    for folder in classes:
        (place / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[: count // len(classes)]:
            (place / folder.name / file.name).symlink_to(file.resolve())
    return place


def work(task: str, folder: Path) -> None:
    """What is measured, in a process of its own."""
    paths = {"train_path": str(folder / "train"), "val_path": str(folder / "test")}
    if task == "e_step":
        from solo_ext.config.compose import compose
        from solo_ext.lab.training.prepare import prepare
        from solo_ext.lab.training.pretrain import pretrain

        changes = (
            "data.dataset=custom",
            "data.fraction=-1",
            *(f"data.{key}={path}" for key, path in paths.items()),
            "data.num_workers=0",
            "backbone.kwargs.channels=[8,8,8,8]",
            f"method_kwargs.proj_output_dim={EMBEDDING}",
            "method_kwargs.num_prototypes=[64,128]",
            "method_kwargs.warmup_epochs=0",
            "method_kwargs.kmeans.restarts=1",
            "max_epochs=1",
            "online_eval.every_n_epochs=0",
            "accelerator=cpu",
        )
        config = compose("cifar10_cpu/pcl", changes)
        config |= {"limit_train_batches": 2, "limit_val_batches": 0}
        pretrain(prepare(config), run_dir=folder / "run", show_progress=False)
        return
    from solo_ext.lab.evaluation.evaluate import evaluate

    own = {"gallery": "train"} if task == "retrieval" else {"k": [20], "temperature": [0.07]}
    settings = {"data": paths, "out": str(folder / task), "num_workers": 0, "device": "cpu", **own}
    evaluate("pixels", task, settings)


def list_bytes(folder: Path) -> int:
    """What a list of files takes in memory."""
    from solo_ext.config.schema import Images
    from solo_ext.data.images import open_images

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = open_images(Images(dataset="custom", train_path=str(folder / "train")), "train")
    assert len(held)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def peak(task: str, folder: Path) -> int:
    """Peak resident bytes of a fresh process (for ``list``: their growth)."""
    words = [sys.executable, __file__, "--child", task, str(folder)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def measured(data: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """Rows of all tasks and sizes."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in sizes:
            folder = Path(scratch) / str(size)
            linked(data / "train", size, folder / "train")
            linked(data / "test", TEST_IMAGES, folder / "test")
            listed = peak("list", folder)
            for task in TASKS:
                width = EMBEDDING if task == "e_step" else PIXELS
                features = size * (4 * width + 8)
                found = {"task": task, "images": size, "peak": peak(task, folder)}
                rows.append({**found, "features": features, "list": listed})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Growth over the smallest size, in MB."""
    first = {r["task"]: r for r in reversed(rows)}
    lines = []
    for row in rows:
        base = first[row["task"]]
        grown, features, listed = (row[k] - base[k] for k in ("peak", "features", "list"))
        beyond = grown - features - listed
        more = row["images"] - base["images"]
        lines.append(
            {
                "task": row["task"],
                "images": row["images"],
                "peak": round(row["peak"] / MB),
                "grown": round(grown / MB),
                "features": round(features / MB),
                "list": round(listed / MB),
                "beyond": round(beyond / MB),
                "per image": round(beyond / more) if more else None,
            }
        )
    return lines


def main() -> None:
    """Measures, prints a table, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[5000, 20_000, 50_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=(*TASKS, "list"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "list":
        print(list_bytes(args.data))
        return
    if args.child:
        work(args.child, args.data)
        print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    lines = table(measured(args.data, args.sizes))
    keys = list(lines[0])
    print(f"| {' | '.join(keys)} |\n{'|---' * len(keys)}|")
    for line in lines:
        print(f"| {' | '.join('' if v is None else str(v) for v in line.values())} |")
    if args.json:
        from solo_ext import host
        from solo_ext.core.files import append_lines
        from solo_ext.lab.training.run_dir import environment

        about = {"unit": "MB", "environment": environment(host.load().info)}
        append_lines(args.json, [about, *lines])


if __name__ == "__main__":
    main()
