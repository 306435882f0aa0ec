"""File lists: the same images as class folders, and one line for a list that is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.data.datasets import class_names, open_images, targets_of
from solo_ext.data.files import files_of
from solo_ext.errors import ConfigError


def section(path: Path, **changes: Any) -> dict[str, Any]:
    base = {"dataset": "custom", "format": "image_folder", "fraction": -1, "no_labels": False}
    return {**base, "train_path": str(path), **changes}


def listed(file: Path, images: Path, separator: str = " ", names: str = "") -> Path:
    """A list of ``images``, backwards."""
    lines = [
        f"{path}{separator}{names}{path.parent.name}" for path in sorted(images.glob("*/*"))[::-1]
    ]
    file.write_text("# path label\n\n" + "\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_is_the_class_folders_in_its_own_order(
    images: Path, tmp_path: Path, separator: str
) -> None:
    found = open_images(section(listed(tmp_path / "list.txt", images, separator)), "train")
    folders = open_images(section(images), "train")
    assert class_names(found) == class_names(folders) == ["0", "1", "2"]
    back = range(len(folders))[::-1]
    assert list(targets_of(found)) == [targets_of(folders)[i] for i in back]
    assert [found[i][1] for i in range(48)] == list(targets_of(found))
    assert files_of(found) == sorted(files_of(folders), reverse=True)
    assert (
        found[0][0].tobytes() == folders[files_of(folders).index(files_of(found)[0])][0].tobytes()
    )


def test_names_are_numbered_in_sorted_order(images: Path, tmp_path: Path) -> None:
    found = open_images(section(listed(tmp_path / "list.txt", images, names="class")), "train")
    assert class_names(found) == ["class0", "class1", "class2"]
    assert list(targets_of(found)) == [2] * 16 + [1] * 16 + [0] * 16


def test_numbers_that_skip_a_class(images: Path, tmp_path: Path) -> None:
    file = next(images.glob("0/*"))
    (tmp_path / "list.txt").write_text(f"{file} 3\n{file} 10\n")
    found = open_images(section(tmp_path / "list.txt"), "train")
    assert list(targets_of(found)) == [3, 10]
    assert len(class_names(found)) == 11


def test_relative_paths_with_spaces(images: Path, tmp_path: Path) -> None:
    place = tmp_path / "a folder"
    place.mkdir()
    (place / "an image.png").write_bytes(next(images.glob("0/*")).read_bytes())
    (tmp_path / "list.txt").write_text("a folder/an image.png some-class")
    found = open_images(section(tmp_path / "list.txt"), "train")
    assert class_names(found) == ["some-class"]
    assert found[0][0].size == (16, 16)
    (tmp_path / "list.txt").write_text("a folder/an image.png")
    bare = open_images(section(tmp_path / "list.txt", no_labels=True), "train")
    assert bare[0][1] == -1
    assert files_of(bare) == [str(place / "an image.png")]


def test_fraction(images: Path, tmp_path: Path) -> None:
    whole = open_images(section(listed(tmp_path / "list.txt", images)), "train")
    half = open_images(section(tmp_path / "list.txt", fraction=0.5), "train")
    assert torch.bincount(torch.tensor(targets_of(half))).tolist() == [8, 8, 8]
    assert files_of(half) == [f for f in files_of(whole) if f in set(files_of(half))]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no image in it"),
        ("# nothing\n", "no image in it"),
        ("\nlonely.png\n", "line 2 has no label"),
        ("missing.png 3", "line 1 names 'missing.png', which is no file"),
    ],
)
def test_one_line_for_a_bad_list(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        open_images(section(tmp_path / "list.txt"), "train")
    assert caught.value.key == "data.train_path"
