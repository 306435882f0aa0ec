"""Data that the shipped configs name, and a valid config to spoil."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

VALID: dict[str, Any] = {
    "name": "run",
    "method": "simclr",
    "backbone": {"name": "timm/resnet10t", "kwargs": {"channels": [8, 8, 8, 8]}},
    "method_kwargs": {"proj_hidden_dim": 8, "proj_output_dim": 8, "temperature": 0.2},
    "momentum": {"base_tau": 0.9},
    "data": {"dataset": "custom", "train_path": "train", "val_path": None, "fraction": 0.5},
    "augmentations": [
        {"rrc": {"crop_min_scale": 0.2}, "crop_size": 32, "num_crops": 2, "mean": [0.5, 0.5, 0.5]}
    ],
    "optimizer": {"name": "sgd", "batch_size": 8, "lr": 0.1, "kwargs": {"momentum": 0.9}},
    "scheduler": {"name": "step", "lr_decay_steps": [1, 2]},
    "online_eval": {"every_n_epochs": 1, "protocols": ["knn"]},
    "max_epochs": 1,
    "devices": [0],
    "precision": "16-mixed",
    "limit_train_batches": 0.5,
    "gradient_clip_val": 1.0,
}


@pytest.fixture
def valid() -> dict[str, Any]:
    """A config that passes the schema; a copy of its own for each test."""
    return copy.deepcopy(VALID)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``SOLO_EXT_DATA`` with class folders where the shipped configs look for CIFAR-10."""
    root = tmp_path_factory.mktemp("solo-ext-data")
    for split in ("train", "test"):
        for label in range(10):
            folder = root / "cifar10" / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(10):
                Image.new("RGB", (32, 32)).save(folder / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOLO_EXT_DATA", str(root))
        yield root
