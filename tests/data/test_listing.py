"""Listings of many images: mapped from the cache folder, and made anew when the folder changed."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from solo_ext.core.errors import UserError
from solo_ext.data.folders import Listing, class_folders
from solo_ext.data.images import files_of, images_fingerprint, open_images
from solo_ext.data.reading import targets_of
from tests.data.making import section

LARGE = 5


@pytest.fixture
def folder(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """48 images of three classes, for long unchanged, of which more than a few are many."""
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("solo_ext.core.draws.LARGE", LARGE)
    monkeypatch.setattr("solo_ext.data.folders._SETTLED", 0)
    return Path(shutil.copytree(images, tmp_path / "images"))


def opened(folder: Path, **changes: Any) -> Any:
    return open_images(section(folder, **changes), "train")


def no_listing(*_: Any, **__: Any) -> Any:
    raise AssertionError("the folder was listed again")


@pytest.mark.parametrize("layout", ["classes", "flat", "list"])
def test_is_mapped_from_the_second_time_on(
    folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files, order, classes and targets are those of a listing in memory."""
    given: dict[str, Any] = {"no_labels": True} if layout == "flat" else {}
    place = folder / "1" if layout == "flat" else folder
    if layout == "list":
        place = tmp_path / "list.txt"
        odd = [f"{f} {f.parent.name}x\n" for f in sorted(folder.glob("*/*"))[::-1]]
        place.write_text("".join(odd))
    with monkeypatch.context() as patch:
        patch.setattr("solo_ext.core.draws.LARGE", 1000)
        small = opened(place, **given)
    assert small.samples.folder is None
    first = opened(place, **given)
    with monkeypatch.context() as patch:
        for name in ("os.walk", "os.listdir", "pathlib.Path.iterdir"):
            patch.setattr(name, no_listing)
        second = opened(place, **given)
    for found in (first, second, pickle.loads(pickle.dumps(second))):
        assert found.samples.folder is not None
        assert list(found.samples) == list(small.samples)
        assert found.samples[-1] == small.samples[len(small) - 1]
        assert (found.classes, targets_of(found)) == (small.classes, targets_of(small))
        assert files_of(found) == files_of(small)
        assert found[0][0].tobytes() == small[0][0].tobytes()
    with pytest.raises(IndexError):
        second.samples[len(second)]
    # Workers that are spawned map the files too.
    assert b"png" not in pickle.dumps(second)
    assert bytes(second.targets) not in pickle.dumps(second)
    # Nothing but the listing is left, and its lock.
    kept = sorted(p.suffix for p in (tmp_path / "cache" / "listings").iterdir())
    assert kept == ["", ".lock"]


@pytest.mark.parametrize("change", ["new", "gone", "name", "nested", "class", "link"])
def test_a_changed_folder_is_listed_again(folder: Path, change: str) -> None:
    (folder / "2" / "deep").mkdir()
    shutil.copy2(folder / "0" / "0.png", folder / "2" / "deep" / "0.png")
    (folder / "link").symlink_to("1")
    before = opened(folder)
    assert images_fingerprint(before, by_name=True) == images_fingerprint(
        opened(folder), by_name=True
    )
    file = folder / "1" / "3.png"
    if change == "new":
        shutil.copy2(file, folder / "1" / "99.png")
    elif change == "gone":
        file.unlink()
    elif change == "name":
        file.rename(file.with_name("03.png"))
    elif change == "nested":
        shutil.copy2(file, folder / "2" / "deep" / "1.png")
    elif change == "class":
        (folder / "0").rename(folder / "00")
    else:
        (folder / "link").unlink()
        (folder / "link").symlink_to("2")
    after = opened(folder)
    assert list(after.samples) != list(before.samples)
    on_disk = {str(Path(p, f)) for p, _, files in os.walk(folder, followlinks=True) for f in files}
    assert {path for path, _ in after.samples} == on_disk
    assert images_fingerprint(before, by_name=True) != images_fingerprint(after, by_name=True)
    with pytest.raises(UserError, match="has changed since this run began"):
        pickle.loads(pickle.dumps(before))


def test_what_just_changed_is_listed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another change at the same tick of the clock would leave the same time."""
    monkeypatch.setattr("solo_ext.data.folders._SETTLED", 10**12)
    opened(folder)
    monkeypatch.setattr("solo_ext.data.folders._SETTLED", 0)
    monkeypatch.setattr("os.walk", no_listing)
    with pytest.raises(AssertionError, match="again"):
        opened(folder)


@pytest.mark.parametrize("name", ["names", "targets", "starts", "about.json"])
def test_a_torn_listing_is_made_anew(folder: Path, name: str, tmp_path: Path) -> None:
    whole = list(opened(folder).samples)
    (kept,) = (p for p in (tmp_path / "cache" / "listings").iterdir() if p.is_dir())
    with open(kept / name, "r+b") as file:
        file.truncate(8)
    assert list(opened(folder).samples) == whole


def test_what_a_killed_process_left_is_removed(folder: Path, tmp_path: Path) -> None:
    opened(folder)
    (kept,) = (p for p in (tmp_path / "cache" / "listings").iterdir() if p.is_dir())
    left = kept.with_name(f".{kept.name}.host-1.saving")
    kept.rename(left)
    opened(folder)
    assert kept.is_dir()
    assert not left.exists()


def test_processes_that_start_together_write_one(folder: Path) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(opened(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({images.samples.digest for images in found}) == 1
    assert len(found) == 4


@pytest.mark.fault
def test_a_disk_that_is_full(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*listings"):
        class_folders(folder, "data.train_path")
    assert [p.suffix for p in (tmp_path / "cache" / "listings").iterdir()] == [".lock"]


def test_names_of_any_kind() -> None:
    """Absolute ones outside of the prefix, and characters that are no UTF-8."""
    names = ["/a/b/x.png", "/a/c.png", os.fsdecode(b"/a/b/\xff\n.png"), "/a/b/y z.png"] * 70
    samples = [(name, number - 1) for number, name in enumerate(names)]
    listing = Listing.of(samples, [], "/a/b/")
    assert list(listing) == samples == [listing[i] for i in range(len(samples))]
    assert list(Listing.of([], [])) == []
