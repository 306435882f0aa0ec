"""Class folders as torchvision reads them, lists of the same files, and listings of many images."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import datasets

from solo_ext.config.schema import Images
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.folders import Listing, class_folders
from solo_ext.data.images import class_names, files_of, images_fingerprint, open_images
from solo_ext.data.reading import UnreadableImage, read_sample, targets_of
from tests.data.making import opened, refused, save_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Class folders with nested folders, links, hidden folders and files that are no images."""
    root = tmp_path / "classes"
    names = ("ant/0.png", "bee/1.png", "cat/2.png")
    nested = ("ant/b/1.PNG", "ant/b.png/2.jpg", "ant/a/z/3.bmp", "bee/Z.png")
    for number, name in enumerate((*names, *nested)):
        save_image(root / name, number)
    (root / "bee" / "more").symlink_to(root / "ant" / "b", target_is_directory=True)
    (root / "cat" / "dangling.png").symlink_to("nowhere.png")
    (root / "cat" / "link.png").symlink_to(root / "ant" / "0.png")
    (root / "notes.png").write_text("no class")
    return root


def test_class_folders_are_read_as_torchvision_reads_them(folder: Path) -> None:
    found = opened(folder)
    theirs = datasets.ImageFolder(str(folder))
    assert list(found.samples) == theirs.samples
    assert (found.classes, found.targets.tolist()) == (theirs.classes, theirs.targets)
    for link in ("bee/more/1.PNG", "cat/link.png"):
        assert str(folder / link) in dict(found.samples)


def test_hidden_files_and_folders_are_passed_over(folder: Path) -> None:
    """Those that editors and file systems leave, in class folders and without classes."""
    given = ({}, {"no_labels": True})
    before = [list(opened(folder, **one).samples) for one in given]
    (folder / ".ipynb_checkpoints").mkdir()
    save_image(folder / ".Trash" / "0.png", 0)
    (folder / "ant" / "._0.png").write_bytes(b"Mac OS X")
    save_image(folder / "ant" / "a" / ".cache" / "z" / "1.png", 1)
    for one, samples in zip(given, before, strict=True):
        found = opened(folder, **one)
        assert (list(found.samples), found.hidden) == (samples, 1)


def test_folders_of_any_depth_without_labels(folder: Path) -> None:
    """In the order of their paths, whether or not class folders come between."""
    found = opened(folder, no_labels=True)
    classes = opened(folder)
    top = [str(folder / "notes.png")]
    assert [path for path, _ in found.samples] == top + [path for path, _ in classes.samples]
    assert set(found.targets.tolist()) == {-1}
    assert found.classes == []
    shown = [path for path, _ in opened(folder / "ant", no_labels=True).samples]
    assert [str(Path(path).relative_to(folder / "ant")) for path in shown] == [
        *("0.png", "a/z/3.bmp", "b/1.PNG", "b.png/2.jpg"),
    ]
    (folder / "ant" / "a" / "loop").symlink_to("../..", target_is_directory=True)
    refused("is a link to a folder that it lies in", folder, no_labels=True)


def test_several_folders_without_labels(folder: Path, tmp_path: Path) -> None:
    save_image(tmp_path / "more" / "in" / "0.png", 3)
    (tmp_path / "more" / "._0.png").touch()
    paths = [str(tmp_path / "more"), str(folder / "bee")]
    found = open_images(Images(dataset="custom", train_path=paths, no_labels=True), "train")
    alone = [opened(path, no_labels=True) for path in paths]
    assert files_of(found) == [file for images in alone for file in files_of(images)]
    assert images_fingerprint(found) is not None
    for given, problem in (
        ({"train_path": paths}, "without labels may lie in several folders"),
        ({"train_path": [*paths, str(folder)]}, "bee'.*lies in"),
        ({"train_path": [*paths, paths[0]]}, "name each folder once"),
        ({"train_path": [*paths, "nowhere"]}, "no such folder"),
        ({"train_path": [*paths, ""]}, "no path"),
    ):
        labels = {} if given["train_path"] == paths else {"no_labels": True}
        with pytest.raises(ConfigError, match=problem):
            open_images(Images(dataset="custom", **given, **labels), "train")


@pytest.mark.parametrize(
    ("link", "target"), [("ant/loop", ".."), ("ant/in/loop", "."), ("dog", "."), ("ant/a", "../b")]
)
def test_refuses_a_circle_of_links(tmp_path: Path, link: str, target: str) -> None:
    for name in ("ant/0.png", "ant/in/1.png", "b/2.png"):
        save_image(tmp_path / name, 0)
    (tmp_path / "b" / "back").symlink_to("../ant", target_is_directory=True)
    assert len(opened(tmp_path)) == 5
    (tmp_path / link).symlink_to(target, target_is_directory=True)
    assert refused("is a link to a folder that it lies in", tmp_path).key == "data.train_path"


def test_refuses_a_file_that_is_no_list(tmp_path: Path) -> None:
    save_image(tmp_path / "image.png", 0)
    refused(r"no text.*path label", tmp_path / "image.png")


def listed(file: Path, images: Path, separator: str) -> Path:
    """A list of ``images``, backwards."""
    lines = [f"{path}{separator}{path.parent.name}" for path in sorted(images.glob("*/*"))[::-1]]
    file.write_text("# path label\n\n" + "\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_is_the_class_folders_in_its_own_order(
    images: Path, tmp_path: Path, separator: str
) -> None:
    found = opened(listed(tmp_path / "list.txt", images, separator))
    folders = opened(images)
    assert class_names(found) == class_names(folders) == ["0", "1", "2"]
    back = range(len(folders))[::-1]
    assert targets_of(found) == [targets_of(folders)[i] for i in back]
    half = opened(tmp_path / "list.txt", fraction=0.5)
    assert torch.bincount(torch.tensor(targets_of(half))).tolist() == [8, 8, 8]
    assert files_of(half) == [f for f in files_of(found) if f in set(files_of(half))]
    assert [found[i][1] for i in range(48)] == targets_of(found)
    assert files_of(found) == sorted(files_of(folders), reverse=True)
    assert (
        found[0][0].tobytes() == folders[files_of(folders).index(files_of(found)[0])][0].tobytes()
    )


def test_relative_paths_with_spaces(images: Path, tmp_path: Path) -> None:
    place = tmp_path / "a folder"
    place.mkdir()
    (place / "an image.png").write_bytes(next(images.glob("0/*")).read_bytes())
    (tmp_path / "list.txt").write_text("a folder/an image.png some-class")
    found = opened(tmp_path / "list.txt")
    assert class_names(found) == ["some-class"]
    assert found[0][0].size == (16, 16)
    (place / "a\ttab.png").write_bytes((place / "an image.png").read_bytes())
    (tmp_path / "list.txt").write_text("a folder/a\ttab.png\t some-class")
    assert files_of(opened(tmp_path / "list.txt")) == [str(place / "a\ttab.png")]
    (tmp_path / "list.txt").write_text("a folder/an image.png\tgreat\u00a0tit")
    assert class_names(opened(tmp_path / "list.txt")) == ["great\u00a0tit"]
    (tmp_path / "list.txt").write_text("a folder/an image.png")
    bare = opened(tmp_path / "list.txt", no_labels=True)
    assert bare[0][1] == -1
    assert files_of(bare) == [str(place / "an image.png")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no image in it"),
        ("# nothing\n", "no image in it"),
        ("\nlonely.png\n", "line 2 has no label"),
        ("missing.png 3", "line 1 names 'missing.png', which is no file"),
        (f"{'x' * 300} 3", r"line 1 names 'x{200}', which is no file"),
    ],
)
def test_one_line_for_a_bad_list(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    assert refused(problem, tmp_path / "list.txt").key == "data.train_path"


@pytest.mark.parametrize(
    ("labels", "classes", "targets"),
    [
        (["3", "1"], ["0", "1", "2", "3"], [3, 1]),
        (["0", "-1", "2", "-7"], ["0", "1", "2"], [0, -1, 2, -1]),
        (["bee", "ant", "bee"], ["ant", "bee"], [1, 0, 1]),
        (["01", "2", "ant"], ["01", "2", "ant"], [0, 1, 2]),
        (["-1", "-", "--1"], ["-", "--1", "-1"], [2, 0, 1]),
    ],
)
def test_labels_are_numbers_or_names(
    labels: list[str], classes: list[str], targets: list[int], images: Path, tmp_path: Path
) -> None:
    file = next(images.glob("0/*"))
    text = "".join(f"{file} {label}\r\n" for label in labels)
    (tmp_path / "list.txt").write_text(text, encoding="utf-8-sig")
    found = opened(tmp_path / "list.txt")
    assert (class_names(found), targets_of(found)) == (classes, targets)
    assert files_of(found) == [str(file)] * len(labels)


@pytest.mark.parametrize(
    ("labels", "odd"),
    [
        (["0", "1", "-1", "01"], "01"),
        (["10", "2", "-0"], "-0"),
        # The numbers of ImageNet's folders, and what would be a class for every number below.
        (["2", "01440764"], "01440764"),
        (["2", "1000000"], "1000000"),
        (["1" * 5000, "2"], "1" * 200),
        (["0.5", "2"], "0.5"),
    ],
)
def test_odd_numbers_among_numbers_are_no_names(
    labels: list[str], odd: str, images: Path, tmp_path: Path
) -> None:
    file = next(images.glob("0/*"))
    (tmp_path / "list.txt").write_text("".join(f"{file} {label}\n" for label in labels))
    refused(f"label '{odd}' is neither a number up to 999999 ", tmp_path / "list.txt")


@pytest.mark.parametrize("sign", ["\u2028", "\x85", "\x0c"])
def test_only_a_line_feed_ends_a_line(images: Path, tmp_path: Path, sign: str) -> None:
    path = tmp_path / f"a{sign}b.png"
    path.write_bytes(next(images.glob("0/*")).read_bytes())
    (tmp_path / "list.txt").write_text(f"{path.name} ant\n", encoding="utf-8")
    found = opened(tmp_path / "list.txt")
    assert files_of(found) == [str(path)]
    assert found[0][1] == 0


def test_a_missing_file_is_skipped_where_unreadable_ones_are(images: Path, tmp_path: Path) -> None:
    file = next(images.glob("0/*"))
    (tmp_path / "dangling.png").symlink_to("nowhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    broken = ("missing.png", "dangling.png", "pipe.png", "x" * 300)
    lines = [f"{name} 1" for name in broken]
    (tmp_path / "list.txt").write_text("\n".join([*lines, f"{file} 0"]))
    found = opened(tmp_path / "list.txt", unreadable="skip")
    assert targets_of(found) == [1, 1, 1, 1, 0]
    for index in range(4):
        with pytest.raises(UnreadableImage):
            found[index]
        assert read_sample(found, index)[0] == 4


# Listings: mapped from the cache folder, and made anew when the folder changed.


LARGE = 5


@pytest.fixture
def many(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """48 images of three classes, for long unchanged, of which more than a few are many."""
    monkeypatch.setattr("solo_ext.core.draws.LARGE", LARGE)
    monkeypatch.setattr("solo_ext.data.folders._SETTLED", 0)
    return Path(shutil.copytree(images, tmp_path / "images"))


def no_listing(*_: Any, **__: Any) -> Any:
    raise AssertionError("the folder was listed again")


@pytest.mark.parametrize("layout", ["classes", "flat", "list"])
def test_is_mapped_from_the_second_time_on(
    many: Path, layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files, order, classes and targets are those of a listing in memory."""
    given: dict[str, Any] = {"no_labels": True} if layout == "flat" else {}
    place = many / "1" if layout == "flat" else many
    if layout == "list":
        place = tmp_path / "list.txt"
        odd = [f"{f} {f.parent.name}x\n" for f in sorted(many.glob("*/*"))[::-1]]
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
def test_a_changed_folder_is_listed_again(many: Path, change: str) -> None:
    (many / "2" / "deep").mkdir()
    shutil.copy2(many / "0" / "0.png", many / "2" / "deep" / "0.png")
    (many / "link").symlink_to("1")
    before = opened(many)
    assert images_fingerprint(before, by_name=True) == images_fingerprint(
        opened(many), by_name=True
    )
    file = many / "1" / "3.png"
    if change == "new":
        shutil.copy2(file, many / "1" / "99.png")
    elif change == "gone":
        file.unlink()
    elif change == "name":
        file.rename(file.with_name("03.png"))
    elif change == "nested":
        shutil.copy2(file, many / "2" / "deep" / "1.png")
    elif change == "class":
        (many / "0").rename(many / "00")
    else:
        (many / "link").unlink()
        (many / "link").symlink_to("2")
    after = opened(many)
    assert list(after.samples) != list(before.samples)
    on_disk = {str(Path(p, f)) for p, _, files in os.walk(many, followlinks=True) for f in files}
    assert {path for path, _ in after.samples} == on_disk
    assert images_fingerprint(before, by_name=True) != images_fingerprint(after, by_name=True)
    with pytest.raises(UserError, match="has changed since this run began"):
        pickle.loads(pickle.dumps(before))


def test_what_just_changed_is_listed_again(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another change at the same tick of the clock would leave the same time."""
    monkeypatch.setattr("solo_ext.data.folders._SETTLED", 10**12)
    opened(many)
    monkeypatch.setattr("solo_ext.data.folders._SETTLED", 0)
    monkeypatch.setattr("os.walk", no_listing)
    with pytest.raises(AssertionError, match="again"):
        opened(many)


@pytest.mark.parametrize("name", ["names", "targets", "starts", "about.json"])
def test_a_torn_listing_is_made_anew(many: Path, name: str, tmp_path: Path) -> None:
    whole = list(opened(many).samples)
    (kept,) = (p for p in (tmp_path / "cache" / "listings").iterdir() if p.is_dir())
    with open(kept / name, "r+b") as file:
        file.truncate(8)
    assert list(opened(many).samples) == whole


def test_what_a_killed_process_left_is_removed(many: Path, tmp_path: Path) -> None:
    opened(many)
    (kept,) = (p for p in (tmp_path / "cache" / "listings").iterdir() if p.is_dir())
    left = kept.with_name(f".{kept.name}.host-1.saving")
    kept.rename(left)
    opened(many)
    assert kept.is_dir()
    assert not left.exists()


def test_processes_that_start_together_write_one(many: Path) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(opened(many))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({images.samples.digest for images in found}) == 1
    assert len(found) == 4


@pytest.mark.fault
def test_a_disk_that_is_full(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*listings"):
        class_folders(many, "data.train_path")
    assert [p.suffix for p in (tmp_path / "cache" / "listings").iterdir()] == [".lock"]


def test_names_of_any_kind() -> None:
    """Absolute ones outside of the prefix, and characters that are no UTF-8."""
    names = ["/a/b/x.png", "/a/c.png", os.fsdecode(b"/a/b/\xff\n.png"), "/a/b/y z.png"] * 70
    samples = [(name, number - 1) for number, name in enumerate(names)]
    listing = Listing.of(samples, [], "/a/b/")
    assert list(listing) == samples == [listing[i] for i in range(len(samples))]
    assert list(Listing.of([], [])) == []
