"""Runs while files come into the folder of images, and over images that are there twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.core.errors import UserError
from solo_ext.data.reading import name_of
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from tests.lab.training.same_run import assert_same_run, final, train

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(images, tmp_path / "images"))


@pytest.mark.fault
@pytest.mark.parametrize(("method", "workers"), [("pcl", 2), ("simclr", 0)])
def test_duplicates_that_come_while_it_trains_change_nothing(
    method: str, workers: int, make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    """Indices, order and labels are of what was there at the start; resuming tells of the rest."""
    data = {"train_path": str(folder), "num_workers": workers}
    config = make_config(method, data=data, max_epochs=3)
    train(config, tmp_path / "whole")

    def copy(trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:
            shutil.copy(folder / "1" / "7.png", folder / "1" / "00.png")
            shutil.copy(folder / "1" / "7.png", folder / "0" / "00.png")

    come = LambdaCallback(on_train_epoch_start=copy)
    train(config, tmp_path / "run", callbacks=[come])
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    with pytest.raises(UserError, match="training images: 48 -> 50"):
        resume(tmp_path / "run")


@pytest.mark.fault
def test_images_that_are_there_more_than_once(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    """Equal images fall into equal clusters, and nothing is divided by their distance."""
    times = 8
    for image in sorted(folder.rglob("*.png")):
        if int(image.stem) >= 16 // times:
            image.unlink()
            continue
        for number in range(1, times):
            shutil.copy(image, image.with_name(f"{image.stem}-{number}.png"))
    config = make_config("pcl", data={"train_path": str(folder)}, max_epochs=2)
    prepared = prepare(config)
    pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    held = final(tmp_path / "run")["state_dict"]
    assert all(v.isfinite().all() for v in held.values() if isinstance(v, torch.Tensor))
    order = sorted(range(48), key=lambda index: _original(prepared.train, index))
    clusters = held["prototypes.assignments"][:, order].unflatten(1, (-1, times))
    assert (clusters == clusters[..., :1]).all()
    assert len(clusters[0].unique()) == 3


def _original(images: Any, index: int) -> str:
    path = Path(name_of(images, index))
    return f"{path.parent.name}/{path.stem.partition('-')[0]}"
