"""HDF5 files in solo-learn main's layout."""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from solo_ext import host
from solo_ext.core.errors import ConfigError
from solo_ext.data.h5 import IMAGENET100, H5Images
from solo_ext.data.images import class_names, images_fingerprint
from solo_ext.data.reading import UnreadableImage, name_of, targets_of
from tests.data import making

h5py = pytest.importorskip("h5py")
Content = dict[str, dict[str, Any]]


def encoded(level: int) -> Any:
    return np.frombuffer(making.png(level), dtype=np.uint8)


def write(path: Path, content: Content) -> Path:
    """Writes groups of arrays."""
    with h5py.File(path, "w") as file:
        for group, images in content.items():
            held = file.create_group(group)
            for name, value in images.items():
                held[name] = value
    return path


def classes(names: tuple[str, ...], each: int = 4) -> Content:
    return {
        name: {f"{i}.png": encoded(20 * label + i) for i in reversed(range(each))}
        for label, name in enumerate(names)
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes of 4 images, written in another order than that of their names."""
    return write(tmp_path_factory.mktemp("h5") / "train.h5", classes(("cat", "ant", "bee")))


opened = functools.partial(making.opened, format="h5")
refused = functools.partial(making.refused, format="h5")


@pytest.mark.parametrize("split", ["train", "val"])
def test_classes_and_targets(path: Path, split: Any) -> None:
    images = opened(path, split=split)
    assert len(images) == 12
    assert class_names(images) == ["ant", "bee", "cat"]
    assert targets_of(images) == [0] * 4 + [1] * 4 + [2] * 4
    for index in range(12):
        image, target = images[index]
        level = 20 * {0: 1, 1: 2, 2: 0}[index // 4] + index % 4
        assert image.getpixel((0, 0)) == (level, 2 * level, 255 - level)
        assert (target, type(target)) == (index // 4, int)
    assert name_of(images, 6) == f"{path}:bee/2.png"


def test_is_read_as_main_reads_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if host.detect().generation != "main":
        pytest.skip("the release has no reader")
    host.load()
    from solo.data.h5_dataset import H5Dataset

    # It keeps a list of the images there, under the file's name.
    monkeypatch.setenv("HOME", str(path.parent))
    theirs, ours = H5Dataset("imagenet", str(path)), H5Images(path)
    assert len(theirs) == len(ours)
    assert theirs.class_to_idx == {name: i for i, name in enumerate(ours.classes)}
    for index in range(len(ours)):
        (image, target), (expected, label) = ours[index], theirs[index]
        assert target == label
        assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_imagenet100_out_of_imagenet(tmp_path: Path) -> None:
    names = (*IMAGENET100, "n00000001", "n99999999")
    path = write(tmp_path / "imagenet.h5", classes(names, each=1))
    images = opened(path, dataset="imagenet100")
    assert class_names(images) == sorted(IMAGENET100)
    assert targets_of(images) == list(range(100))
    assert len(opened(path, dataset="imagenet")) == 102
    few = write(tmp_path / "few.h5", classes(IMAGENET100[:3], each=1))
    assert len(opened(few, dataset="imagenet100")) == 3
    if root := os.environ.get("SOLO_LEARN_ROOT"):
        listed = Path(root) / "solo" / "data" / "dataset_subset" / "imagenet100_classes.txt"
        assert set(listed.read_text().split()) == set(IMAGENET100)


def test_no_labels_and_fraction(path: Path) -> None:
    images = opened(path, no_labels=True)
    assert (len(images), set(targets_of(images)), images[7][1]) == (12, {-1}, -1)
    assert name_of(images, 6).endswith("bee/2.png")
    half = opened(path, fraction=0.5)
    assert sorted(targets_of(half)) == [0, 0, 1, 1, 2, 2]
    assert name_of(half, 0).startswith(f"{path}:ant/")
    copy = pickle.loads(pickle.dumps(half))
    assert copy[3][1] == half[3][1] == 1


MOVED = 12345


def _moved(images: H5Images, sender: Any) -> None:
    images[0]
    assert images._file is not None
    handle = images._file[1].id.get_vfd_handle()
    sender.send(os.lseek(handle, MOVED, os.SEEK_SET))


def test_a_fork_does_not_move_its_parents_place(path: Path) -> None:
    """Two descriptors of one opening share one place in the file."""
    images = H5Images(path)
    images[0]
    assert images._file is not None
    mine = images._file[1].id.get_vfd_handle()
    before = os.lseek(mine, 0, os.SEEK_CUR)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_moved, args=(images, sender))
    process.start()
    process.join(60)
    assert receiver.poll()
    assert receiver.recv() == MOVED
    assert before == os.lseek(mine, 0, os.SEEK_CUR) != MOVED
    assert images[0][1] == 0


@pytest.mark.fault
def test_too_many_open_files_are_not_the_images_fault(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = H5Images(path)
    with monkeypatch.context() as patch:
        patch.setattr(h5py, "File", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            images[0]
    assert images[0][1] == 0


@pytest.mark.fault
def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = {
        "a": {
            "0": np.frombuffer(b"no image", dtype=np.uint8),
            "1": encoded(3)[:50],
            "2": np.zeros((4, 4, 3), dtype=np.uint8),
            "3": "text",
            "4": np.zeros(0, dtype=np.uint8),
            "5": np.zeros(9, dtype=np.int64),
            "6": encoded(3),
        }
    }
    path = write(tmp_path / "x.h5", broken)
    images = opened(path)
    reasons = ["it is no image of", "runcated", "bytes of", "bytes of", "empty", "bytes of"]
    for index, reason in enumerate(reasons):
        with pytest.raises(UnreadableImage, match=reason) as caught:
            images[index]
        assert caught.value.what == f"{path}:a/{index}"
    assert images[6][1] == 0


def damaged(link: Any, name: Any) -> Any:
    def make(path: Path) -> None:
        with h5py.File(write(path, classes(("a",))), "a") as file:
            file[name] = link

    return make


@pytest.mark.fault
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), "a folder, not an HDF5 file"),
        (lambda p: p.write_text("no hdf5"), "not an HDF5 file"),
        (lambda p: p.write_bytes(b""), "not an HDF5 file"),
        (lambda p: write(p, {}), "no images"),
        (lambda p: write(p, {"a": {}}), "no images"),
        (lambda p: write(p, {**classes(("a",)), "b": {}}), "its class 'b' has no images"),
        (damaged(h5py.SoftLink("/nowhere"), "b"), "or damaged"),
        (damaged(encoded(3), b"\xff\xfe/0.png"), "or damaged"),
        (damaged(encoded(3), b"a/\xff\xfe.png"), "or damaged"),
    ],
)
def test_files_of_another_kind(make: Any, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    make(path)
    error = refused(problem, path, split="val")
    assert (error.key, error.value) == ("data.val_path", str(path))


@pytest.mark.fault
def test_bytes_that_are_overwritten(tmp_path: Path) -> None:
    """Wherever that is, one of the two errors that end in a line."""
    whole = write(tmp_path / "x.h5", classes(("a", "b"), each=2)).read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for place in range(0, len(whole), 31):
        torn = bytearray(whole)
        torn[place : place + 8] = rng.bytes(8)
        (tmp_path / "y.h5").write_bytes(torn[: len(whole)])
        try:
            images = opened(tmp_path / "y.h5")
        except ConfigError:
            refused += 1
            continue
        for index in range(len(images)):
            with contextlib.suppress(UnreadableImage):
                images[index]
        if images._file is not None:
            images._file[1].close()
    assert refused


def test_without_h5py(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(r"h5py is not installed; pip install 'solo-ext\[h5\]'", path)


def test_a_copy_has_the_same_names(path: Path, tmp_path: Path) -> None:
    """A job may copy the file at every start; which images they are stays the same."""
    copy = tmp_path / "copy.h5"
    shutil.copyfile(path, copy)
    here, there = opened(path), opened(copy)
    assert images_fingerprint(here) != images_fingerprint(there)
    assert images_fingerprint(here, by_name=True) == images_fingerprint(there, by_name=True)
    with h5py.File(copy, "a") as file:
        file.move("ant/0.png", "ant/00.png")
    renamed = opened(copy)
    assert images_fingerprint(here, by_name=True) != images_fingerprint(renamed, by_name=True)
