"""Shards written from every format, in parts too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from solo_ext.core.errors import UserError
from solo_ext.data.convert import STARTED, convert
from solo_ext.data.images import class_names
from solo_ext.data.reading import SkipUnreadable, UnreadableImage, targets_of
from tests.data.making import opened, png, save_table, write_folder, write_h5, write_tars

FILES = [png(20 * level) for level in range(12)]


def folder(root: Path) -> dict[str, Any]:
    return {"path": write_folder(root / "folder", FILES)}


def listed(root: Path) -> dict[str, Any]:
    folder(root)
    lines = [f"folder/{'ab'[i // 6]}/{i:02d}.png {'ab'[i // 6]}" for i in range(12)]
    (root / "list.txt").write_text("\n".join(lines))
    return {"path": root / "list.txt"}


def h5(root: Path) -> dict[str, Any]:
    write_h5(root / "images.h5", FILES)
    return {"path": root / "images.h5", "format": "h5"}


def table(root: Path) -> dict[str, Any]:
    save_table(root / "table", FILES)
    return {"path": root / "table", "format": "huggingface"}


def shards(root: Path) -> dict[str, Any]:
    convert(opened(**folder(root)), root / "first", 1000)
    return {"path": root / "first", "format": "streaming"}


def tars(root: Path) -> dict[str, Any]:
    images = opened(**folder(root))
    return {"path": write_tars(root / "tars", images, 5), "format": "webdataset"}


def unlabelled(root: Path) -> dict[str, Any]:
    return {**h5(root), "no_labels": True}


def half(root: Path) -> dict[str, Any]:
    return {**h5(root), "fraction": 0.5}


def pixels(images: Any) -> list[tuple[bytes, int]]:
    return sorted((images[i][0].tobytes(), images[i][1]) for i in range(len(images)))


@pytest.mark.parametrize("make", [folder, listed, h5, table, shards, tars, unlabelled, half])
def test_from_every_format(make: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    images = opened(**make(tmp_path))
    done = convert(images, tmp_path / "shards", 500)
    assert (done.images, done.unreadable) == (len(images), [])
    found = opened(tmp_path / "shards", format="streaming")
    assert pixels(found) == pixels(images)
    assert class_names(found) == class_names(images)
    assert sorted(targets_of(found)) == sorted(targets_of(images))
    # The bytes of the files, and not of new ones.
    assert {found.encoded(i) for i in range(len(found))} <= set(FILES)  # type: ignore[attr-defined]
    assert done.shards == len(list((tmp_path / "shards").glob("*.mds"))) > 1
    assert not (tmp_path / "shards" / STARTED).exists()


class Arrays(Dataset[Any]):
    """Images without files, as torchvision's CIFAR."""

    targets = [0, 1, 1]
    fingerprint = "three"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        drawn = np.random.default_rng(index).integers(0, 256, (5, 4, 3), dtype=np.uint8)
        return Image.fromarray(drawn), self.targets[index]


def test_images_without_files_keep_their_pixels(tmp_path: Path) -> None:
    images: Any = Arrays()
    convert(images, tmp_path)
    found = opened(tmp_path, format="streaming")
    assert pixels(found) == pixels(images)


@pytest.mark.fault
def test_unreadable_images(tmp_path: Path) -> None:
    path = folder(tmp_path)["path"]
    (path / "a" / "03.png").write_bytes(b"no image")
    (path / "b" / "11.png").write_bytes(b"")
    with pytest.raises(UnreadableImage, match=r"03\.png|11\.png"):
        convert(opened(path), tmp_path / "refused", 500)
    done = convert(opened(path, unreadable="skip"), tmp_path / "out", 500)
    assert done.images == 10
    assert [Path(name).name for name in done.unreadable] == ["03.png", "11.png"]
    found = opened(tmp_path / "out", format="streaming")
    readable = [FILES[i] for i in range(12) if i not in (3, 11)]
    assert sorted(found.encoded(i) for i in range(10)) == sorted(readable)  # type: ignore[attr-defined]
    assert [found[i][1] for i in range(10)] == targets_of(found)


def test_an_image_larger_than_a_shard(tmp_path: Path) -> None:
    done = convert(opened(**folder(tmp_path)), tmp_path / "out", 1)
    assert (done.images, done.shards) == (12, 12)


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != ".lock"}


@pytest.mark.fault
def test_goes_on_after_the_last_whole_shard(tmp_path: Path) -> None:
    """Wherever it ended, the shards are those of one that was left alone."""
    path = folder(tmp_path)["path"]
    (path / "a" / "03.png").write_bytes(b"no image")
    images = opened(path, unreadable="skip")
    convert(images, tmp_path / "whole", 500)
    for stop in range(12):
        out = tmp_path / f"parts{stop}"

        def end(done: int, total: int, stop: int = stop) -> None:
            if done == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(images, out, 500, end)
        begun = len(list(out.glob("*.mds")))
        # As if killed while it wrote a shard, between the shard and its line, and within a line.
        (out / ".shard.00099.mds.host-1.saving").write_bytes(b"half")
        if begun:
            lines = (out / STARTED).read_bytes()
            (out / STARTED).write_bytes(lines[: -1 - stop % 40])
        seen: list[int] = []
        convert(images, out, 500, lambda done, total, seen=seen: seen.append(done))  # type: ignore[misc]
        assert contents(out) == contents(tmp_path / "whole")
        assert begun < 2 or seen[0] > 0


def test_refuses_what_it_did_not_begin(tmp_path: Path) -> None:
    images = opened(**folder(tmp_path))

    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(images, tmp_path / "out", 500, end)
    for other, size in ((images, 501), (SkipUnreadable(images), 500), (Arrays(), 500)):
        with pytest.raises(UserError, match="conversion of other images"):
            convert(other, tmp_path / "out", size)  # type: ignore[arg-type]
    convert(images, tmp_path / "out", 500)
    with pytest.raises(UserError, match="holds shards already"):
        convert(images, tmp_path / "out", 500)


@pytest.mark.parametrize("known", [True, False])
def test_refuses_rows_that_may_be_others(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of as many rows with the same labels, and one of which nothing tells the rows."""

    def end(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    images = opened(**table(tmp_path))
    save_table(tmp_path / "other", FILES[::-1])
    other = opened(tmp_path / "other", format="huggingface")
    if not known:
        monkeypatch.setattr(type(images), "fingerprint", None)
    with pytest.raises(KeyboardInterrupt):
        convert(images, tmp_path / "out", 500, end)
    with pytest.raises(UserError, match="conversion of other images"):
        convert(other, tmp_path / "out", 500)
    assert convert(images, tmp_path / "out", 500).images == 12
