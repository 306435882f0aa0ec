"""Formats of data from pretraining to kNN, by the command line.

CIFAR-100 and STL-10 from the files that torchvision unpacks; HDF5 files and local Hugging Face data
sets, which train as class folders do.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision import datasets

from tests.conftest import json_lines, packed
from tests.lab.cli.conftest import Command, document, run_command

CLASSES, PER_CLASS, BATCH = ("ant", "bee", "cat"), {"train": 12, "val": 5}, 16
LABELLED, UNLABELLED, TEST = 24, 40, 12
SMALL = ("accelerator=cpu", f"optimizer.batch_size={BATCH}", "max_epochs=1")
OF_FILES = (
    "backbone.kwargs.channels=[8,8,8,8]",
    "data.fraction=-1",
    "data.num_workers=1",
    "augmentations.0.crop_size=16",
)
OF_ARCHIVES = (
    "backbone.name=timm/resnet10t",
    "backbone.kwargs={channels: [8,8,8,8]}",
    "augmentations.0.crop_size=32",
    "data.num_workers=0",
    "scheduler.name=none",
    "+online_eval.every_n_epochs=1",
    "+online_eval.protocols=[knn]",
)


def measured(
    command: Command, config: str, root: Path, paths: dict[str, str], *given: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record of kNN after an epoch, and the lines of metrics.jsonl."""
    places = [f"data.{split}_path={path}" for split, path in paths.items()]
    words = ("--config-name", config, "--run-dir", str(root / "run"), "--json")
    run = Path(document(command("pretrain", *words, *SMALL, *given, *places))["run_dir"])
    measure = ("eval", "knn", str(run), "k=[1,20]", "temperature=[0.07]", "--json")
    record: dict[str, Any] = document(command(*measure))
    assert json.loads((run / "eval_knn.json").read_text()) == record
    return record, json_lines(run / "metrics.jsonl")


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
    held = folder(root).items()
    return {split: str(packed(Path(path), root / f"{split}.h5")) for split, path in held}


def tables(root: Path, write: str, suffix: str = "") -> dict[str, str]:
    datasets: Any = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=list(CLASSES))
    features = datasets.Features({"image": datasets.Image(), "label": label})
    paths = {split: f"{root}/{split}{suffix}" for split in PER_CLASS}
    for split, path in paths.items():
        held = images(split)
        columns = {
            "image": [{"bytes": content, "path": name} for _, name, content in held],
            "label": [CLASSES.index(label) for label, _, _ in held],
        }
        getattr(datasets.Dataset.from_dict(columns, features=features), write)(path)
    return paths


def saved(root: Path) -> dict[str, str]:
    return tables(root, "save_to_disk")


def parquet(root: Path) -> dict[str, str]:
    return tables(root, "to_parquet", ".parquet")


def digest(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def drawn(count: int, side: int, seed: int) -> NDArray[np.uint8]:
    """Images (n, 3, side, side), each of its own colour and pattern."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8)
    return blocks.repeat(side // 4, axis=2).repeat(side // 4, axis=3)


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Python's pickles of CIFAR-100, with checksums to match; the test images are of training."""
    place = tmp_path / "cifar-100-python"
    place.mkdir()
    images, labels = drawn(LABELLED, 32, seed=0), [i % 4 + 96 for i in range(LABELLED)]
    for name, count in (("train", LABELLED), ("test", TEST)):
        held = {
            "filenames": [f"{name}_{i}.png" for i in range(count)],
            "batch_label": f"{name} batch 1 of 1",
            "fine_labels": labels[:count],
            "coarse_labels": [0] * count,
            "data": images[:count].reshape(count, -1),
        }
        (place / name).write_bytes(pickle.dumps(held, protocol=2))
    names = {"fine_label_names": [f"class {i:02d}" for i in range(100)], "coarse_label_names": []}
    (place / "meta").write_bytes(pickle.dumps(names, protocol=2))
    for split in ("train", "test"):
        monkeypatch.setattr(
            datasets.CIFAR100, f"{split}_list", [[split, digest(place / split)]], raising=True
        )
    meta = {**datasets.CIFAR100.meta, "md5": digest(place / "meta")}
    monkeypatch.setattr(datasets.CIFAR100, "meta", meta)
    return tmp_path


@pytest.fixture
def stl10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """STL-10's binary files, columns first, labels from 1; the unlabelled images are the test's."""
    place = tmp_path / "stl10_binary"
    place.mkdir()
    images, labels = drawn(LABELLED, 96, seed=1), np.arange(LABELLED, dtype=np.uint8) % 10 + 1
    unlabelled = drawn(UNLABELLED, 96, seed=2)
    unlabelled[:TEST] = images[:TEST]
    for name, held in (
        ("train_X", images.transpose(0, 1, 3, 2)),
        ("train_y", labels),
        ("test_X", images[:TEST].transpose(0, 1, 3, 2)),
        ("test_y", labels[:TEST]),
        ("unlabeled_X", unlabelled.transpose(0, 1, 3, 2)),
    ):
        np.ascontiguousarray(held).tofile(place / f"{name}.bin")
    (place / "class_names.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n")
    for split in ("train", "test"):
        listed = getattr(datasets.STL10, f"{split}_list")
        known = [[name, digest(place / name)] for name, _ in listed]
        monkeypatch.setattr(datasets.STL10, f"{split}_list", known)
    return tmp_path


Found = tuple[list[float], list[dict[str, Any]], list[int]]
"""Losses, results of kNN, and numbers of images."""


def found_with(
    command: Command, make: Callable[[Path], dict[str, str]], kind: str, root: Path
) -> Found:
    given = ["data.dataset=custom", f"data.format={kind}"]
    given += [f"+data.huggingface.cache_dir={root}/cache"] if kind == "huggingface" else []
    record, lines = measured(command, "digits/debiased", root, make(root), *OF_FILES, *given)
    losses = [line["train_debiased_loss"] for line in lines if "train_debiased_loss" in line]
    return losses, record["results"], [record[split]["images"] for split in ("train", "test")]


@pytest.fixture(scope="module")
def of_folders(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What class folders give."""
    root = tmp_path_factory.mktemp("folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return found_with(run_command, folder, "image_folder", root)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(h5, "h5"), (saved, "huggingface"), (parquet, "huggingface")],
    ids=["h5", "saved table", "parquet"],
)
def test_trains_and_measures_what_class_folders_do(
    make: Callable[[Path], dict[str, str]],
    kind: str,
    of_folders: Found,
    command: Command,
    tmp_path: Path,
) -> None:
    """The same images in the same order: the same losses and the same scores."""
    found = found_with(command, make, kind, tmp_path)
    assert found == of_folders
    losses, results, counts = found
    assert losses
    assert results[0]["acc1"] > 90
    assert counts[1] == len(CLASSES) * PER_CLASS["val"]


def assert_archive(command: Command, name: str, root: Path, images: int, augmentation: str) -> None:
    """Trained on ``images``; every test image is its own nearest neighbour in training."""
    paths = dict.fromkeys(("train", "val"), str(root))
    given = (*OF_ARCHIVES, f"data.augmentation={augmentation}")
    record, lines = measured(command, f"{name}/debiased", root, paths, *given)
    (checkpoint,) = (root / "run").glob("*.ckpt")
    steps = torch.load(checkpoint, weights_only=True)["global_step"]
    assert steps == images // BATCH
    assert (record["train"]["images"], record["test"]["images"]) == (LABELLED, TEST)
    accuracy = {row["k"]: row["acc1"] for row in record["results"]}
    assert accuracy[1] == 100
    online = [line["online_knn_acc1"] for line in lines if "online_knn_acc1" in line]
    assert online[-1] == pytest.approx(accuracy[20])


def test_cifar100(cifar100: Path, command: Command) -> None:
    assert_archive(command, "cifar100", cifar100, LABELLED, "image")


def test_stl10(stl10: Path, command: Command) -> None:
    """Trained on labelled and unlabelled images, evaluated on labelled ones alone."""
    assert_archive(command, "stl10", stl10, LABELLED + UNLABELLED, "batch")
    own = ("epochs=1", f"batch_size={BATCH}", "layer_decay=1")
    record = document(command("eval", "finetune", str(stl10 / "run"), *own, "--json"))
    assert record["train"]["images"] == LABELLED
