"""Images of a config: opening them, what can be told of them, and the parts of a split."""

import errno
import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import datasets

from solo_ext.core.errors import ConfigError
from solo_ext.data.folders import ImageFiles
from solo_ext.data.images import class_names, open_images
from solo_ext.data.reading import UnreadableImage, name_of, targets_of
from tests.data.making import save_image, section

COUNTS = {"ant": 20, "bee": 10, "cat": 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 20, 10 and 30 images."""
    root = tmp_path_factory.mktemp("classes")
    for label, (name, count) in enumerate(COUNTS.items()):
        for number in range(count):
            save_image(root / name / f"{number:02d}.png", 100 * label + number)
    return root


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """One folder of images without classes, and a file that is none."""
    for number, suffix in enumerate(("jpg", "PNG", "jpeg", "bmp")):
        save_image(tmp_path / f"{9 - number}.{suffix}", number)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_reads_no_image_for_names_and_targets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: Any = open_images(section(folder, fraction=0.5), "train")

    def refuse(encoded: bytes) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("solo_ext.data.reading._decoded", refuse)
    assert len(targets_of(images)) == 30
    assert class_names(images) == ["ant", "bee", "cat"]
    with pytest.raises(UnreadableImage, match="decoded"):
        images[0]


def test_unlabelled_images(flat: Path) -> None:
    images = open_images(section(flat, no_labels=True), "train")
    assert isinstance(images, ImageFiles)
    assert [Path(path).name for path, _ in images.samples] == ["6.bmp", "7.jpeg", "8.PNG", "9.jpg"]
    assert len(images) == 4
    assert all(images[i][1] == -1 and images[i][0].mode == "RGB" for i in range(4))
    assert targets_of(images) == [-1] * 4
    half = open_images(section(flat, no_labels=True, fraction=0.5), "train")
    assert targets_of(half) == [-1] * 2


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_fraction_is_stratified_and_fixed(folder: Path, fraction: float) -> None:
    found = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        images = open_images(section(folder, fraction=fraction), "train")
        assert isinstance(images, Subset)
        found.append(list(images.indices))
    assert found[0] == found[1] == sorted(set(found[0])) != list(range(len(found[0])))
    counts = torch.tensor(targets_of(images)).bincount().tolist()
    assert counts == pytest.approx([fraction * c for c in COUNTS.values()], abs=0.5)
    assert class_names(images) == ["ant", "bee", "cat"]
    assert images[0][1] == targets_of(images)[0]


@pytest.mark.parametrize(("fraction", "split"), [(-1, "train"), (1.0, "train"), (0.5, "val")])
def test_fraction_leaves_the_rest_whole(folder: Path, fraction: float, split: Any) -> None:
    images = open_images(section(folder, fraction=fraction), split)
    assert len(images) == 60
    assert not isinstance(images, Subset)


@pytest.mark.parametrize("fraction", [-1, 0.5])
def test_holdout_parts_the_training_images(folder: Path, fraction: float) -> None:
    given = section(folder, fraction=fraction, holdout=0.2, val_path=None)
    whole = open_images(given.model_copy(update={"holdout": None}), "train")
    parts = {split: open_images(given, split) for split in ("train", "val")}
    held, kept = ({name_of(parts[s], i) for i in range(len(parts[s]))} for s in ("val", "train"))
    assert held | kept == {name_of(whole, i) for i in range(len(whole))}
    assert not held & kept
    for split, share in (("train", 0.8), ("val", 0.2)):
        counts = torch.tensor(targets_of(parts[split])).bincount()
        every = torch.tensor(targets_of(whole)).bincount()
        assert ((counts - share * every).abs() <= 0.5).all()
        assert class_names(parts[split]) == ["ant", "bee", "cat"]


def test_holdout_takes_labelled_images_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STL-10 is trained on with its unlabelled images."""
    images = [(None, number % 2 if number < 20 else -1) for number in range(50)]
    monkeypatch.setattr(datasets, "STL10", lambda *_, **__: images)
    given = section(tmp_path, dataset="stl10", holdout=0.2)
    assert sorted(targets_of(open_images(given, "val"))) == [0, 0, 1, 1]
    rest = torch.tensor(targets_of(open_images(given, "train")))
    assert (rest + 1).bincount().tolist() == [30, 8, 8]


def test_holdout_without_labels(flat: Path) -> None:
    with pytest.raises(ConfigError, match="no training image has a label") as caught:
        open_images(section(flat, no_labels=True, holdout=0.2), "val")
    assert caught.value.key == "data.holdout"


@pytest.mark.parametrize("key", ["fraction", "holdout"])
@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_without_some_class(folder: Path, key: str, share: float) -> None:
    with pytest.raises(ConfigError, match="images this leaves classes out") as caught:
        open_images(section(folder, **{key: share}), "train")
    assert caught.value.key == f"data.{key}"


@pytest.mark.parametrize(
    ("layout", "split", "problem"),
    [
        ([], "train", "no class folders"),
        (["image.png"], "val", "no class folders"),
        (["ant/"], "val", "first 'ant'"),
        (["ant/0.png", "bee/notes.txt"], "train", "in 1 of its class folders, the first 'bee'"),
        ([], "unlabelled", "no image in it"),
        (["ant/0.png"], "unlabelled", "no image in it"),
    ],
)
def test_refuses_other_layouts(tmp_path: Path, layout: list[str], problem: str, split: Any) -> None:
    for number, name in enumerate(layout):
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        elif name.endswith(".png"):
            save_image(tmp_path / name, number)
        else:
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text("no image")
    unlabelled = split == "unlabelled"
    split = "train" if unlabelled else split
    with pytest.raises(ConfigError, match=problem) as caught:
        open_images(section(tmp_path, no_labels=unlabelled), split)
    assert caught.value.key == f"data.{split}_path"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("split", ["train", "val"])
def test_refuses_a_missing_path(tmp_path: Path, split: Any) -> None:
    for data, problem in (
        (section(tmp_path / "nowhere"), "no such folder"),
        (section(tmp_path, train_path=None, val_path=None), "no path"),
        (section(""), "no path"),
        (section("x" * 300), "File name too long"),
        (section(tmp_path, dataset="cifar100"), "Dataset not found"),
        (section(tmp_path, dataset="stl10"), "Dataset not found"),
    ):
        with pytest.raises(ConfigError, match=problem) as caught:
            open_images(data, split)
        assert caught.value.key == f"data.{split}_path"


@pytest.mark.parametrize("layout", ["classes", "nested", "flat", "list"])
def test_refuses_what_may_not_be_read(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, whatever cannot be listed or opened."""
    place = tmp_path / ("data.txt" if layout == "list" else "data")
    held_back = place / "ant" / "old" if layout == "nested" else place
    if place.suffix:
        place.write_text("image.png 3")
    else:
        save_image(place / "ant" / "0.png", 0)
        save_image(place / "ant" / "old" / "1.png", 0)
    # The superuser may read anything.
    _forbid(monkeypatch, held_back)
    given = {"no_labels": True} if layout == "flat" else {}
    with pytest.raises(ConfigError, match="Permission denied") as caught:
        open_images(section(place, **given), "train")
    assert (caught.value.key, caught.value.value) == ("data.train_path", str(place))
    assert "\n" not in str(caught.value)


def _forbid(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Makes the system refuse one folder or file."""

    def refusing(call: Any) -> Any:
        def refuse(name: Any, *given: Any, **more: Any) -> Any:
            if str(name) == str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(name, *given, **more)

        return refuse

    for place, name in ((os, "scandir"), (os, "listdir"), (io, "open")):
        monkeypatch.setattr(place, name, refusing(getattr(place, name)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cifar10", {"train": False}), ("cifar100", {"train": False}), ("stl10", {"split": "test"})],
)
def test_sets_of_torchvision(
    tmp_path: Path, name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def opened(root: str, **given: Any) -> Any:
        asked.append((root, given))
        return [(Image.new("RGB", (32, 32)), 3)]

    monkeypatch.setattr(datasets, name.upper(), opened)
    images = open_images(section(tmp_path, dataset=name), "val")
    assert (targets_of(images), asked) == ([3], [(str(tmp_path), expected)])
