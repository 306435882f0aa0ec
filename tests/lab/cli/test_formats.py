"""HDF5 files and local Hugging Face data sets, from pretraining to kNN by the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Command = Callable[..., Any]
CLASSES, PER_CLASS, BATCH = ("ant", "bee", "cat"), {"train": 12, "val": 5}, 16
TINY = (
    "accelerator=cpu",
    "backbone.kwargs.channels=[8,8,8,8]",
    f"optimizer.batch_size={BATCH}",
    "max_epochs=1",
    "data.fraction=-1",
    "data.num_workers=1",
    "augmentations.0.crop_size=16",
)


def images(split: str) -> list[tuple[str, str, bytes]]:
    """Class, name and PNG of every image, by class and name; classes have colours of their own."""
    rng, found = np.random.default_rng(len(split)), []
    for label, name in enumerate(CLASSES):
        for number in range(PER_CLASS[split]):
            pixels = rng.integers(0, 90, (16, 16, 3))
            pixels[..., label] += 160
            file = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
            found.append((name, f"{number:02d}.png", file.getvalue()))
    return found


def folder(root: Path) -> dict[str, str]:
    for split in PER_CLASS:
        for label, name, content in images(split):
            (root / split / label).mkdir(parents=True, exist_ok=True)
            (root / split / label / name).write_bytes(content)
    return {split: str(root / split) for split in PER_CLASS}


def h5(root: Path) -> dict[str, str]:
    h5py = pytest.importorskip("h5py")
    for split in PER_CLASS:
        with h5py.File(root / f"{split}.h5", "w") as file:
            for label, name, content in images(split):
                file[f"{label}/{name}"] = np.frombuffer(content, dtype=np.uint8)
    return {split: str(root / f"{split}.h5") for split in PER_CLASS}


def table(split: str) -> Any:
    datasets: Any = pytest.importorskip("datasets")
    held = images(split)
    columns = {
        "image": [{"bytes": content, "path": name} for _, name, content in held],
        "label": [CLASSES.index(label) for label, _, _ in held],
    }
    label = datasets.ClassLabel(names=list(CLASSES))
    features = datasets.Features({"image": datasets.Image(), "label": label})
    return datasets.Dataset.from_dict(columns, features=features)


def saved(root: Path) -> dict[str, str]:
    for split in PER_CLASS:
        table(split).save_to_disk(str(root / split))
    return {split: str(root / split) for split in PER_CLASS}


def parquet(root: Path) -> dict[str, str]:
    for split in PER_CLASS:
        table(split).to_parquet(str(root / f"{split}.parquet"))
    return {split: str(root / f"{split}.parquet") for split in PER_CLASS}


def measured(
    make: Callable[[Path], dict[str, str]], kind: str, root: Path, command: Command
) -> Any:
    """The record of kNN, and the losses of the epoch before it."""
    root.mkdir()
    paths = make(root)
    given = ("data.dataset=custom", f"data.format={kind}")
    own = (f"data.train_path={paths['train']}", f"data.val_path={paths['val']}")
    cache = (f"+data.huggingface.cache_dir={root / 'cache'}",) if kind == "huggingface" else ()
    config = ("--config-name", "digits/debiased", "--run-dir", str(root / "run"), "--json")
    done = command("pretrain", *config, *TINY, *given, *own, *cache)
    assert done.code == 0, done.err
    run = Path(json.loads(done.out)["run_dir"])
    losses = [
        row["train_debiased_loss"]
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "train_debiased_loss" in row
    ]
    assert losses
    done = command("eval", "knn", str(run), "k=[1,5]", "num_workers=1", "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert json.loads((run / "eval_knn.json").read_text()) == record
    return record, losses


@pytest.mark.parametrize(
    ("make", "kind"),
    [(h5, "h5"), (saved, "huggingface"), (parquet, "huggingface")],
    ids=["h5", "saved table", "parquet"],
)
def test_trains_and_measures_what_class_folders_do(
    make: Callable[[Path], dict[str, str]], kind: str, command: Command, tmp_path: Path
) -> None:
    """The same images in the same order: the same losses and the same scores."""
    record, losses = measured(make, kind, tmp_path / "it", command)
    expected, expected_losses = measured(folder, "image_folder", tmp_path / "folder", command)
    assert losses == expected_losses
    assert record["results"] == expected["results"]
    assert record["results"][0]["acc1"] > 90
    for split in ("train", "test"):
        assert record[split]["images"] == expected[split]["images"]
    assert record["test"]["images"] == len(CLASSES) * PER_CLASS["val"]
