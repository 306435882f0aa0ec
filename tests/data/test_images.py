"""Images of a config: opening them, their names, labels and fingerprints, and parts of a split."""

from __future__ import annotations

import errno
import functools
import io
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import datasets

from solo_ext.data.folders import ImageFiles
from solo_ext.data.huggingface import HuggingFaceImages
from solo_ext.data.images import _stratified, class_names, files_of, images_fingerprint
from solo_ext.data.reading import UnreadableImage, name_of, targets_of
from tests.data.making import opened, png, refused, save_image, save_table, write_h5

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
    images = opened(folder, fraction=0.5)

    def refuse(encoded: bytes) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("solo_ext.data.reading._to_rgb", refuse)
    assert len(targets_of(images)) == 30
    assert class_names(images) == ["ant", "bee", "cat"]
    with pytest.raises(UnreadableImage, match="decoded"):
        images[0]


def test_unlabelled_images(flat: Path) -> None:
    images = opened(flat, no_labels=True)
    assert isinstance(images, ImageFiles)
    assert [Path(path).name for path, _ in images.samples] == ["6.bmp", "7.jpeg", "8.PNG", "9.jpg"]
    assert len(images) == 4
    assert all(images[i][1] == -1 and images[i][0].mode == "RGB" for i in range(4))
    assert targets_of(images) == [-1] * 4
    half = opened(flat, no_labels=True, fraction=0.5)
    assert targets_of(half) == [-1] * 2


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_fraction_is_stratified_and_fixed(folder: Path, fraction: float) -> None:
    found = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        images = opened(folder, fraction=fraction)
        assert isinstance(images, Subset)
        found.append(list(images.indices))
    assert found[0] == found[1] == sorted(set(found[0])) != list(range(len(found[0])))
    counts = torch.tensor(targets_of(images)).bincount().tolist()
    assert counts == pytest.approx([fraction * c for c in COUNTS.values()], abs=0.5)
    assert class_names(images) == ["ant", "bee", "cat"]
    assert images[0][1] == targets_of(images)[0]


def test_a_part_has_an_image_of_every_class() -> None:
    """A tenth of four images is none by rounding."""
    targets = np.repeat([0, 1, 2], [900, 90, 4])
    kept = _stratified(targets, 0.1, "data.holdout")
    assert np.bincount(targets[kept]).tolist() == [90, 9, 1]
    assert kept.tolist() == sorted(set(kept.tolist()))


@pytest.mark.parametrize(("fraction", "split"), [(-1, "train"), (1.0, "train"), (0.5, "val")])
def test_fraction_leaves_the_rest_whole(folder: Path, fraction: float, split: Any) -> None:
    images = opened(folder, fraction=fraction, split=split)
    assert len(images) == 60
    assert not isinstance(images, Subset)


@pytest.mark.parametrize("fraction", [-1, 0.5])
def test_holdout_parts_the_training_images(folder: Path, fraction: float) -> None:
    given: dict[str, Any] = {"fraction": fraction, "val_path": None}
    whole = opened(folder, **given)
    parts = {split: opened(folder, split, holdout=0.2, **given) for split in ("train", "val")}
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
    given: dict[str, Any] = {"dataset": "stl10", "holdout": 0.2}
    assert sorted(targets_of(opened(tmp_path, "val", **given))) == [0, 0, 1, 1]
    rest = torch.tensor(targets_of(opened(tmp_path, **given)))
    assert (rest + 1).bincount().tolist() == [30, 8, 8]


def test_holdout_without_labels(flat: Path) -> None:
    """A random part, the same in every process, and the rest."""
    given: dict[str, Any] = {"no_labels": True, "holdout": 0.25}
    whole = files_of(opened(flat, no_labels=True))
    train, val = (files_of(opened(flat, split=split, **given)) for split in ("train", "val"))
    assert len(val) == round(0.25 * len(whole))
    assert sorted([*train, *val]) == whole
    assert val != whole[: len(val)]
    assert set(targets_of(opened(flat, split="val", **given))) == {-1}
    for holdout in (0.001, 0.999):
        error = refused(
            "leaves none to train on, or holds none out", flat, no_labels=True, holdout=holdout
        )
        assert error.key == "data.holdout"


@pytest.mark.parametrize("key", ["fraction", "holdout"])
@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_without_some_class(folder: Path, key: str, share: float) -> None:
    assert refused("images this leaves classes out", folder, **{key: share}).key == f"data.{key}"


@pytest.mark.parametrize(
    ("layout", "split", "problem"),
    [
        ([], "train", "no class folders"),
        (["image.png"], "val", "no class folders"),
        (["ant/"], "val", "first 'ant'"),
        (["ant/0.png", "bee/notes.txt"], "train", "in 1 of its class folders, the first 'bee'"),
        ([], "unlabelled", "no image in it"),
        (["._0.png", ".trash/0.png", "ant/notes.txt"], "unlabelled", "no image in it"),
    ],
)
def test_refuses_other_layouts(tmp_path: Path, layout: list[str], problem: str, split: Any) -> None:
    for number, name in enumerate(layout):
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        elif name.endswith(".png"):
            save_image(tmp_path / name, number)
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("no image")
    unlabelled = split == "unlabelled"
    split = "train" if unlabelled else split
    error = refused(problem, tmp_path, no_labels=unlabelled, split=split)
    assert error.key == f"data.{split}_path"


@pytest.mark.parametrize("split", ["train", "val"])
def test_refuses_a_missing_path(tmp_path: Path, split: Any) -> None:
    for error in (
        refused("no such folder", tmp_path / "nowhere", split=split),
        refused("no path", tmp_path, train_path=None, val_path=None, split=split),
        refused("no path", "", split=split),
        refused("File name too long", "x" * 300, split=split),
        refused("Dataset not found", tmp_path, dataset="cifar100", split=split),
        refused("Dataset not found", tmp_path, dataset="stl10", split=split),
    ):
        assert error.key == f"data.{split}_path"


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
    error = refused("Permission denied", place, **given)
    assert (error.key, error.value) == ("data.train_path", str(place))


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


def test_sets_of_torchvision_as_class_folders(tmp_path: Path) -> None:
    """Not where torchvision's own folder lies there too, nor other data sets."""
    for name in "abcdefghij":
        save_image(tmp_path / name / "0.png", 0)
    images = opened(tmp_path, dataset="cifar10")
    assert (targets_of(images), class_names(images)) == (list(range(10)), list("abcdefghij"))
    few = "neither torchvision's cifar100 is in it nor 100 class folders \\(it has 10\\)"
    for no_labels in (False, True):
        assert (
            refused(few, tmp_path, dataset="cifar100", no_labels=no_labels).key == "data.train_path"
        )
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert refused("Dataset not found", tmp_path, dataset="cifar10").value == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cifar10", {"train": False}), ("cifar100", {"train": False}), ("stl10", {"split": "test"})],
)
def test_sets_of_torchvision(
    tmp_path: Path, name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(root: str, **given: Any) -> Any:
        asked.append((root, given))
        return [(Image.new("RGB", (32, 32)), 3)]

    monkeypatch.setattr(datasets, name.upper(), load)
    images = opened(tmp_path, dataset=name, split="val")
    assert (targets_of(images), asked) == ([3], [(str(tmp_path), expected)])


# Fingerprints.


@pytest.fixture
def copied(images: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(images, tmp_path / "images"))


def fingerprint(path: Path, by_name: bool = False, **changes: Any) -> str:
    found = images_fingerprint(opened(path, **changes), by_name=by_name)
    assert found is not None
    return found


names = functools.partial(fingerprint, by_name=True)


@pytest.mark.parametrize("change", ["size", "time", "new", "gone", "class"])
def test_changes_with_the_files(change: str, copied: Path) -> None:
    before = fingerprint(copied)
    assert before == fingerprint(copied)
    file = copied / "1" / "3.png"
    if change == "size":
        held = file.stat()
        file.write_bytes(file.read_bytes() + b"x")
        os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    elif change == "new":
        shutil.copy2(file, copied / "1" / "99.png")
    elif change == "gone":
        file.unlink()
    else:
        (copied / "00").mkdir()
        shutil.copy2(file, copied / "00" / "0.png")
        shutil.rmtree(copied / "0")
    assert fingerprint(copied) != before


@pytest.mark.parametrize("changes", [{}, {"fraction": 0.5}, {"holdout": 0.5}], ids=str)
def test_images_that_may_be_skipped(changes: dict[str, Any], copied: Path) -> None:
    """Their names are known; which features they have is not, so these are not stored."""
    given = {**changes, "unreadable": "skip"}
    skipping = names(copied, **given)
    assert skipping == names(copied, **given) != names(copied, **changes)
    images = opened(copied, **given)
    assert images_fingerprint(images) is None
    for file in sorted((copied / "1").iterdir()):
        file.rename(file.with_name(f"other-{file.name}"))
    assert names(copied, **given) != skipping


@pytest.mark.parametrize("skip", ["refuse", "skip"])
def test_one_file_of_many_images_without_labels(skip: str, tmp_path: Path) -> None:
    path = tmp_path / "data.h5"
    given: dict[str, Any] = {"format": "h5", "no_labels": True, "unreadable": skip}
    write_h5(path, [png(1), png(2)])
    before = names(path, **given)
    assert before == names(path, **given) != names(path, **given | {"no_labels": False})
    write_h5(path, [png(1), png(2), png(3)])
    assert names(path, **given) != before


def test_a_list_may_name_both_kinds_of_paths(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Itself named by a relative path; it is the same list wherever it is read from."""
    lines = [f"1/3.png a\n{copied}/2/4.png b\n", f"1/3.png a\n{copied}/2/5.png b\n"]
    monkeypatch.chdir(copied.parent)
    found = []
    for text in lines:
        (copied / "list.txt").write_text(text)
        relative = Path(copied.name) / "list.txt"
        assert names(relative) == names(copied / "list.txt")
        found.append(names(relative))
    assert found[0] != found[1]


def test_a_copy_elsewhere_has_the_same_names(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(copied, tmp_path / "elsewhere" / "copy"))
    monkeypatch.chdir(copy)
    assert names(copied) == names(copy) == names(Path())
    (copy / "1" / "3.png").rename(copy / "1" / "33.png")
    assert names(copied) != names(copy)


def test_names_need_not_be_utf8(copied: Path) -> None:
    before = fingerprint(copied)
    odd = os.fsencode(copied / "1") + b"/\xff.png"
    with open(odd, "wb") as file:
        file.write((copied / "1" / "3.png").read_bytes())
    assert fingerprint(copied) != before


@pytest.mark.parametrize(("kind", "write"), [("h5", write_h5), ("huggingface", save_table)])
def test_files_of_many_images(kind: str, write: Any, tmp_path: Path) -> None:
    path = tmp_path / "data"
    write(path, [png(level) for level in (1, 2, 3, 4)])
    first, half = fingerprint(path, format=kind), fingerprint(path, format=kind, fraction=0.5)
    assert first == fingerprint(path, format=kind) != half
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    write(path, [png(level) for level in (1, 2, 3, 5)])
    assert fingerprint(path, format=kind) != first


def test_rows_that_are_paths_tell_nothing(copied: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [str(copied / "1" / "3.png")], "label": [0]}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(2)})
    made = datasets.Dataset.from_dict(rows, kinds)
    assert images_fingerprint(HuggingFaceImages(made, "x")) is None
