"""Runs that are chosen on training images set aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.config.schema import CommonConfig, Images
from solo_ext.data.images import files_of, open_images
from solo_ext.data.loaders import training_set
from solo_ext.data.reading import targets_of
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.training.prepare import prepare
from tests.conftest import MakeConfig, packed
from tests.lab.training.same_run import assert_resumes


def _as_list(images: Path, file: Path) -> Path:
    lines = [f"{path} {path.parent.name}" for path in sorted(images.glob("*/*"))]
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("kind", ["list", "h5", "huggingface", "dali", "skip"])
def test_every_format_parts_the_same_way(kind: str, images: Path, tmp_path: Path) -> None:
    """Each holds the same images in the same order, so each holds out the same."""
    path = images
    if kind == "list":
        path = _as_list(images, tmp_path / "list.txt")
    elif kind == "h5":
        path = packed(images, tmp_path / "images.h5")
    elif kind == "huggingface":
        pytest.importorskip("datasets")
    form = {"list": "image_folder", "skip": "image_folder"}.get(kind, kind)
    data = Images.model_validate(
        {
            **{"dataset": "custom", "format": form, "train_path": str(path), "holdout": 0.25},
            "unreadable": "skip" if kind == "skip" else "refuse",
            "huggingface": {"cache_dir": str(tmp_path / "cache")},
        }
    )
    parts = [open_images(data, split) for split in ("train", "val")]
    plain = Images(dataset="custom", train_path=str(images), holdout=0.25)
    expected = [open_images(plain, split) for split in ("train", "val")]
    for part, other, count in zip(parts, expected, (12, 4), strict=True):
        assert torch.tensor(targets_of(part)).bincount().tolist() == [count] * 3
        if kind == "huggingface":
            # It lists the files of a class in another order.
            continue
        assert [part[i][0].tobytes() for i in range(3 * count)] == [
            other[i][0].tobytes() for i in range(3 * count)
        ]
    seen = {part[i][0].tobytes() for part in parts for i in range(len(part))}
    assert len(seen) == 48
    if kind == "dali":
        assert not set(files_of(parts[0])) & set(files_of(parts[1]))


@pytest.mark.parametrize("more", [{}, {"augmentation": "batch", "in_memory": True}])
def test_resumed_is_the_same(more: dict[str, Any], make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        "simclr",
        data={"holdout": 0.25, **more},
        max_epochs=2,
        optimizer={"batch_size": 8},
        checkpoint={"every_n_steps": 1},
    )

    prepared = prepare(config)
    assert (len(prepared.train), len(prepared.val or ())) == (36, 12)
    assert_resumes(config, tmp_path, 6)
    record = evaluate(tmp_path / "parts", "knn", {"k": [1]})
    assert (record["train"]["images"], record["test"]["images"]) == (36, 12)


def test_what_a_script_of_solo_learn_trains_on_is_whole(images: Path) -> None:
    """Which reads no `data.holdout`: sample i is image i of all."""

    class Trainer:
        train_dataloader = object()

    data = Images(
        dataset="custom", format="dali", train_path=str(images), holdout=0.25, unreadable="skip"
    )
    found = training_set(Trainer(), CommonConfig.model_construct(data=data))
    assert len(files_of(found.images)) == 48
