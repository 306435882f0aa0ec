"""Features of real images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from solo_ext.core.errors import ConfigError
from solo_ext.core.files import atomic_write
from solo_ext.lab.evaluation import supervised
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.evaluation.features import Features
from tests.conftest import made_images
from tests.lab.training.same_run import train

PLAIN: dict[str, Any] = {"rrc": {"enabled": False}, "horizontal_flip": {"prob": 0.0}}
"""Views without augmentation."""
RESNET: dict[str, Any] = {"pretrained": False, "model_kwargs": {"channels": [8, 8, 8, 8]}}
"""A small network with drawn weights, for ``timm/resnet10t``."""


@pytest.fixture(scope="session")
def val(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other images of the classes of ``images``."""
    return made_images(tmp_path_factory.mktemp("val"), "012", 7, seed=1)


@pytest.fixture(scope="session")
def run(
    make_config: Callable[..., dict[str, Any]], val: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """SimCLR trained for an epoch; tests that write to it take a copy."""
    config = make_config("simclr", data={"val_path": str(val)})
    return train(config, tmp_path_factory.mktemp("runs") / "run").run_dir


@pytest.fixture(scope="session")
def pcl(
    make_config: Callable[..., dict[str, Any]], val: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """PCL with 3 and 6 clusters of 48 images of three classes."""
    # Until batch norm knows the images, all of them move to one cluster between two E-steps.
    data, optimizer = {"val_path": str(val)}, {"lr": 0.03}
    config = make_config("pcl", data=data, max_epochs=10, optimizer=optimizer)
    return train(config, tmp_path_factory.mktemp("pcl") / "run").run_dir


def refusal(model: Path | str, protocol: str, settings: dict[str, Any]) -> str:
    """The line that says why a protocol does not take these settings."""
    with pytest.raises(ConfigError) as caught:
        evaluate(model, protocol, settings)
    return str(caught.value)


def shared(data: dict[str, str], out: Path) -> dict[str, Any]:
    """Settings of every protocol for images of 16 x 16."""
    return {"data": data, "crop_size": 16, "num_workers": 0, "device": "cpu", "out": str(out)}


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Path]]:
    """``interrupt(n)``: a training with labels stops after n epochs; returns what it writes."""

    def after(epochs: int) -> list[Path]:
        def write(path: Path, save: Callable[[Path], object]) -> None:
            atomic_write(path, save)
            written.append(path)
            if len(written) == epochs:
                raise KeyboardInterrupt

        written: list[Path] = []
        monkeypatch.setattr(supervised, "atomic_write", write)
        return written

    return after


@pytest.fixture(scope="session")
def digits() -> Features:
    """Pixels of scikit-learn's digits: 1,000 images to train on, 797 to test."""
    bunch = load_digits()
    x, y = torch.from_numpy(bunch.data).float(), torch.from_numpy(bunch.target).long()
    return Features((x[:1000], y[:1000]), (x[1000:], y[1000:]), [str(c) for c in range(10)])


@pytest.fixture(scope="session")
def digit_images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Class folders of scikit-learn's digits at 16 x 16: 300 images to train on, 150 to test."""
    bunch, root = load_digits(), tmp_path_factory.mktemp("digits")
    for place, (pixels, label) in enumerate(zip(bunch.images[:450], bunch.target, strict=False)):
        folder = root / ("train" if place < 300 else "val") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))
        grey.resize((16, 16), Image.Resampling.BICUBIC).save(folder / f"{place:04d}.png")
    return {f"{split}_path": str(root / split) for split in ("train", "val")}
