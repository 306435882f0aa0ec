"""The directory of a run, and drawn images with embeddings and clusters; nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from solo_ext.lab.evaluation.sample import Clusters, Sample
from solo_ext.lab.training.run_dir import CONFIG, ENVIRONMENT, METRICS

MakeSample = Callable[[Sequence[str]], Sample]
EPOCHS, STEPS = 3, 4


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three epochs of four steps, at batch size 10."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = {
        "name": "flowers",
        "method": "pcl",
        "backbone": {"name": "timm/resnet10t"},
        "max_epochs": EPOCHS,
        "optimizer": {"batch_size": 10},
        "devices": "1",
    }
    (folder / CONFIG).write_text(yaml.safe_dump(config))
    environment = {"solo_ext": "1.0", "host": {"version": "1.0.6"}, "packages": {"torch": "2.15"}}
    (folder / ENVIRONMENT).write_text(json.dumps(environment))
    lines: list[dict[str, Any]] = [
        {"step": 0, "seconds": 0.5, "online_knn_acc1": 10.0, "epochs_done": 0}
    ]
    for epoch in range(EPOCHS):
        step = (epoch + 1) * STEPS - 1
        at = {"step": step, "seconds": 2.0 * (epoch + 1)}
        lines += [
            {**at, "train_embedding_spread": 0.25 * (epoch + 1)},
            {**at, "epochs_done": epoch + 1, "online_knn_acc1": 20.0 * (epoch + 1)},
            {
                **at,
                "epoch": epoch,
                "train_info_nce_loss_epoch": 4.0 - epoch,
                "train_class_loss": 1.0,
            },
        ]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def make_sample(tmp_path: Path) -> MakeSample:
    """Makes one image for each name: three tight groups, with clusters at two granularities."""

    def make(names: Sequence[str]) -> Sample:
        rng, n = np.random.default_rng(0), len(names)
        group = np.arange(n) % 3
        x = np.eye(3, 8)[group] + 0.05 * rng.normal(size=(n, 8))
        colours = np.array([[200, 40, 40], [40, 160, 60], [40, 80, 200]])

        def picture(row: int) -> Image.Image:
            noise = np.random.default_rng(row).integers(0, 50, (24, 32, 3))
            return Image.fromarray((colours[group[row]] + noise).astype(np.uint8))

        fine = group * 2 + (np.arange(n) // 3) % 2
        phi = np.array([0.1, 0.2, 0.3])[group]
        clusters = {k: Clusters(of, rng.random(n), phi) for k, of in ((3, group), (6, fine))}
        return Sample(names, x, picture, [f"class {g}" for g in group], clusters)

    return make
