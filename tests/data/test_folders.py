"""Class folders as torchvision reads them, and lists of the same files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import datasets

from solo_ext.core.errors import ConfigError
from solo_ext.data.images import class_names, files_of, open_images
from solo_ext.data.reading import UnreadableImage, read_sample, targets_of
from tests.data.making import save_image, section


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
    (root / "notes.png").write_text("no class")
    return root


def test_class_folders_are_read_as_torchvision_reads_them(folder: Path) -> None:
    found: Any = open_images(section(folder), "train")
    theirs = datasets.ImageFolder(str(folder))
    assert list(found.samples) == theirs.samples
    assert (found.classes, found.targets.tolist()) == (theirs.classes, theirs.targets)
    assert str(folder / "bee" / "more" / "1.PNG") in dict(found.samples)


def test_hidden_folders_are_no_classes(folder: Path) -> None:
    """Those that editors and file systems leave."""
    before: Any = open_images(section(folder), "train")
    (folder / ".ipynb_checkpoints").mkdir()
    save_image(folder / ".Trash" / "0.png", 0)
    found: Any = open_images(section(folder), "train")
    assert (found.classes, list(found.samples)) == (before.classes, list(before.samples))


@pytest.mark.parametrize(
    ("link", "target"), [("ant/loop", ".."), ("ant/in/loop", "."), ("dog", "."), ("ant/a", "../b")]
)
def test_refuses_a_circle_of_links(tmp_path: Path, link: str, target: str) -> None:
    for name in ("ant/0.png", "ant/in/1.png", "b/2.png"):
        save_image(tmp_path / name, 0)
    (tmp_path / "b" / "back").symlink_to("../ant", target_is_directory=True)
    assert len(open_images(section(tmp_path), "train")) == 5
    (tmp_path / link).symlink_to(target, target_is_directory=True)
    with pytest.raises(ConfigError, match="is a link to a folder that it lies in") as caught:
        open_images(section(tmp_path), "train")
    assert caught.value.key == "data.train_path"


def test_refuses_a_file_that_is_no_list(tmp_path: Path) -> None:
    save_image(tmp_path / "image.png", 0)
    with pytest.raises(ConfigError, match=r"no text.*path label"):
        open_images(section(tmp_path / "image.png"), "train")


def listed(file: Path, images: Path, separator: str) -> Path:
    """A list of ``images``, backwards."""
    lines = [f"{path}{separator}{path.parent.name}" for path in sorted(images.glob("*/*"))[::-1]]
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
    assert targets_of(found) == [targets_of(folders)[i] for i in back]
    half = open_images(section(tmp_path / "list.txt", fraction=0.5), "train")
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
    found = open_images(section(tmp_path / "list.txt"), "train")
    assert class_names(found) == ["some-class"]
    assert found[0][0].size == (16, 16)
    (tmp_path / "list.txt").write_text("a folder/an image.png")
    bare = open_images(section(tmp_path / "list.txt", no_labels=True), "train")
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
    with pytest.raises(ConfigError, match=problem) as caught:
        open_images(section(tmp_path / "list.txt"), "train")
    assert caught.value.key == "data.train_path"


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
    found = open_images(section(tmp_path / "list.txt"), "train")
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
    with pytest.raises(ConfigError, match=f"label '{odd}' is neither a number up to 999999 "):
        open_images(section(tmp_path / "list.txt"), "train")


@pytest.mark.parametrize("sign", ["\u2028", "\x85", "\x0c"])
def test_only_a_line_feed_ends_a_line(images: Path, tmp_path: Path, sign: str) -> None:
    path = tmp_path / f"a{sign}b.png"
    path.write_bytes(next(images.glob("0/*")).read_bytes())
    (tmp_path / "list.txt").write_text(f"{path.name} ant\n", encoding="utf-8")
    found = open_images(section(tmp_path / "list.txt"), "train")
    assert files_of(found) == [str(path)]
    assert found[0][1] == 0


def test_a_missing_file_is_skipped_where_unreadable_ones_are(images: Path, tmp_path: Path) -> None:
    file = next(images.glob("0/*"))
    (tmp_path / "dangling.png").symlink_to("nowhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    broken = ("missing.png", "dangling.png", "pipe.png", "x" * 300)
    lines = [f"{name} 1" for name in broken]
    (tmp_path / "list.txt").write_text("\n".join([*lines, f"{file} 0"]))
    found = open_images(section(tmp_path / "list.txt", unreadable="skip"), "train")
    assert targets_of(found) == [1, 1, 1, 1, 0]
    for index in range(4):
        with pytest.raises(UnreadableImage):
            found[index]
        assert read_sample(found, index)[0] == 4
