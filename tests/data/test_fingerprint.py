"""Whether images on disk are still the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

from solo_ext.data.datasets import open_images
from solo_ext.data.fingerprint import images_fingerprint

DATA = {"dataset": "custom", "format": "image_folder"}


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(images, tmp_path / "images"))


def fingerprint(folder: Path, **changes: Any) -> str:
    found = images_fingerprint(open_images({**DATA, "train_path": str(folder), **changes}, "train"))
    assert found is not None
    return found


def test_is_repeatable(folder: Path) -> None:
    assert fingerprint(folder) == fingerprint(folder)


@pytest.mark.parametrize("change", ["size", "time", "new", "gone", "class"])
def test_changes_with_the_files(change: str, folder: Path) -> None:
    before = fingerprint(folder)
    file = folder / "1" / "3.png"
    if change == "size":
        held = file.stat()
        file.write_bytes(file.read_bytes() + b"x")
        os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    elif change == "new":
        shutil.copy2(file, folder / "1" / "99.png")
    elif change == "gone":
        file.unlink()
    else:
        (folder / "00").mkdir()
        shutil.copy2(file, folder / "00" / "0.png")
        shutil.rmtree(folder / "0")
    assert fingerprint(folder) != before


def test_part_of_the_images_is_another_set(folder: Path) -> None:
    whole, half = fingerprint(folder), fingerprint(folder, fraction=0.5)
    assert whole != half == fingerprint(folder, fraction=0.5)


def test_folder_without_labels(folder: Path) -> None:
    assert fingerprint(folder / "0", no_labels=True) != fingerprint(folder / "1", no_labels=True)


def test_own_fingerprint_counts() -> None:
    class Own(list[int]):
        fingerprint = "abc"

    class Plain(list[int]):
        pass

    own: Any = Own([1, 2])
    assert images_fingerprint(own) is not None
    assert images_fingerprint(Subset(own, [0])) != images_fingerprint(own)  # type: ignore[arg-type]
    assert images_fingerprint(Plain([1])) is None  # type: ignore[arg-type]
