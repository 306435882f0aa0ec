"""CIFAR-100 and STL-10 from the files that torchvision unpacks, by the command line."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision import datasets

Command = Callable[..., Any]
LABELLED, UNLABELLED, TEST, BATCH = 24, 40, 12, 16
TINY = (
    "accelerator=cpu",
    "backbone.name=timm/resnet10t",
    "backbone.kwargs={channels: [8,8,8,8]}",
    f"optimizer.batch_size={BATCH}",
    "data.num_workers=0",
    "max_epochs=1",
    "scheduler.name=none",
    "+online_eval.every_n_epochs=1",
    "+online_eval.protocols=[knn]",
)


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


def pretrained(command: Command, dataset: str, root: Path, *more: str) -> Path:
    config = ("--config-name", f"{dataset}/debiased", "--run-dir", str(root / "run"), "--json")
    paths = (f"data.train_path={root}", f"data.val_path={root}")
    done = command("pretrain", *config, *TINY, *paths, *more)
    assert done.code == 0, done.err
    return Path(json.loads(done.out)["run_dir"])


def steps(run: Path) -> int:
    (checkpoint,) = run.glob("*.ckpt")
    return int(torch.load(checkpoint, weights_only=True)["global_step"])


def online(run: Path) -> Iterator[float]:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        if "online_knn_acc1" in (row := json.loads(line)):
            yield row["online_knn_acc1"]


def knn(command: Command, run: Path) -> tuple[dict[str, Any], dict[int, float]]:
    done = command("eval", "knn", str(run), "k=[1,20]", "temperature=[0.07]", "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    return record, {row["k"]: row["acc1"] for row in record["results"]}


@pytest.mark.parametrize("augmentation", ["batch", "image"])
def test_cifar100(augmentation: str, cifar100: Path, command: Command) -> None:
    run = pretrained(command, "cifar100", cifar100, f"data.augmentation={augmentation}")
    assert steps(run) == LABELLED // BATCH
    record, accuracy = knn(command, run)
    assert (record["train"]["images"], record["test"]["images"]) == (LABELLED, TEST)
    assert accuracy[1] == 100, "every test image is its own neighbour in training"
    assert list(online(run))[-1] == pytest.approx(accuracy[20])


@pytest.mark.parametrize("augmentation", ["batch", "image"])
def test_stl10(augmentation: str, stl10: Path, command: Command) -> None:
    """Trained on labelled and unlabelled images, evaluated on labelled ones alone."""
    small = ("augmentations.0.crop_size=32", f"data.augmentation={augmentation}")
    run = pretrained(command, "stl10", stl10, *small)
    assert steps(run) == (LABELLED + UNLABELLED) // BATCH > LABELLED // BATCH
    record, accuracy = knn(command, run)
    assert (record["train"]["images"], record["test"]["images"]) == (LABELLED, TEST)
    assert accuracy[1] == 100
    assert list(online(run))[-1] == pytest.approx(accuracy[20])


def test_stl10_protocols_that_train(stl10: Path, command: Command) -> None:
    run = pretrained(command, "stl10", stl10, "augmentations.0.crop_size=32")
    own = ("epochs=1", f"batch_size={BATCH}", "layer_decay=1")
    done = command("eval", "finetune", str(run), *own, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["train"]["images"] == LABELLED
