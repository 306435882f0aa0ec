"""Whether two splits number their classes alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solo_ext.config import schema
from solo_ext.core.errors import ConfigError
from solo_ext.data.images import open_images
from solo_ext.data.reading import targets_of
from solo_ext.lab.evaluation.context import same_classes


def listed(images: Path, file: Path, labels: list[str]) -> Any:
    path = next(images.glob("0/*"))
    file.write_text("".join(f"{path} {label}\n" for label in labels))
    return open_images(schema.Images(dataset="custom", val_path=str(file)), "val")


@pytest.mark.parametrize("labels", [["1"], ["0", "1"], ["2"], ["0", "1", "2"]])
def test_whole_numbers_are_their_own(images: Path, tmp_path: Path, labels: list[str]) -> None:
    train = listed(images, tmp_path / "train.txt", ["0", "1", "2"])
    val = listed(images, tmp_path / "val.txt", labels)
    same_classes(train, val, "val.txt")
    assert list(targets_of(val)) == [int(label) for label in labels]


@pytest.mark.parametrize(
    ("labels", "problem"),
    [(["b", "c"], "class 'a' is missing"), (["a", "d"], "class 'd' is not among"), (["a"], None)],
)
def test_names_are_numbered_by_their_order(
    images: Path, tmp_path: Path, labels: list[str], problem: str | None
) -> None:
    train = listed(images, tmp_path / "train.txt", ["a", "b", "c"])
    val = listed(images, tmp_path / "val.txt", labels)
    if problem is None:
        same_classes(train, val, "val.txt")
        return
    with pytest.raises(ConfigError, match=problem):
        same_classes(train, val, "val.txt")
