"""Every pretraining config of solo-learn's main branch composes and passes the checks here."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from solo_ext import host
from solo_ext.config.compose import compose
from solo_ext.lab.training.prepare import prepare

ROOT = os.environ.get("SOLO_LEARN_ROOT")
CONFIGS = Path(ROOT or "", "scripts", "pretrain")
NAMES = sorted(
    file.relative_to(CONFIGS).as_posix()
    for file in (CONFIGS.rglob("*.y*ml") if ROOT else ())
    if file.parent.name not in ("augmentations", "wandb")
)
IMAGES = 4096
"""As many as the largest prototypes of those configs need."""
pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(ROOT is None, reason="SOLO_LEARN_ROOT names no checkout of main"),
    pytest.mark.skipif(host.detect().generation != "main", reason="built-ins of main"),
]


@pytest.fixture(scope="module")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of links to one image."""
    root = tmp_path_factory.mktemp("many")
    first = root / "image.png"
    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(first)
    for label in range(2):
        (root / "classes" / str(label)).mkdir(parents=True)
    for number in range(IMAGES):
        (root / "classes" / str(number % 2) / f"{number}.png").hardlink_to(first)
    return root / "classes"


@pytest.mark.parametrize("name", NAMES)
def test_loads(name: str, many_images: Path) -> None:
    """Only where the images are and what they are computed on is not as written."""
    file = CONFIGS / name
    overrides = [
        "data.dataset=custom",
        f"data.train_path={many_images}",
        f"data.val_path={many_images}",
        "accelerator=cpu",
        "devices=1",
        "dali.device=cpu",
    ]
    if "dali" in file.read_text():
        pytest.importorskip("nvidia.dali")
    prepared = prepare(compose(file.name, overrides, file.parent))
    written, given = OmegaConf.load(file), prepared.run
    assert given.name.lower().startswith(given.method)
    assert given.name == written.name
    assert given.max_epochs == written.max_epochs
    for key in ("batch_size", "lr", "classifier_lr", "weight_decay"):
        assert getattr(given.optimizer, key) == written.optimizer[key]
    assert len(prepared.train) == IMAGES


def test_there_are_configs() -> None:
    assert len(NAMES) > 40
