"""Image files: class folders, one folder without classes, or a text file that lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from solo_ext.core.errors import ConfigError
from solo_ext.data.listing import Sample, Seen, note, open_listing
from solo_ext.data.reading import ImageFiles

_NUMBER = re.compile(r"0|-?[1-9]\d{0,5}")
"""Labels of this form count as numbers of classes, if all labels of a list have it."""
_DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def unlabelled_folder(root: Path) -> ImageFiles:
    """All images of one folder, in the order of their names, with target -1.

    >>> from solo_ext.data.digits import digits_folder
    >>> images = unlabelled_folder(digits_folder("train") / "0")
    >>> len(images), images[0][1]
    (140, -1)
    """

    def walk(seen: Seen, _classes: list[str]) -> Iterator[Sample]:
        note(seen, root)
        for name in sorted(os.listdir(root)):
            path = root / name
            if path.suffix.lower() in IMG_EXTENSIONS and not path.is_dir():
                yield str(path), -1

    return ImageFiles(open_listing(root, _prefix(root), "images", walk))


def class_folders(root: Path, key: str) -> ImageFiles:
    """The images of a folder of class folders, in torchvision's order and numbering.

    An image in a subfolder of a class folder belongs to the class; links to folders are followed.
    Hidden class folders (``.ipynb_checkpoints``), which make torchvision's ``ImageFolder`` fail,
    are left out. ``key`` is the config's, for messages.

    Raises:
        ConfigError: no class folders, one without images, or a link to a folder that contains it.
        OSError: a folder cannot be read.

    >>> from solo_ext.data.digits import digits_folder
    >>> images = class_folders(digits_folder("val"), "data.val_path")
    >>> len(images), images.classes[:3], images[0][0].size
    (397, ['0', '1', '2'], (32, 32))
    """

    def walk(seen: Seen, classes: list[str]) -> Iterator[Sample]:
        note(seen, root)
        folders = (p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        classes += sorted(p.name for p in folders)
        empty = []
        for target, name in enumerate(classes):
            file = None
            for file in _images_below(root / name, root, key, seen):
                yield file, target
            if file is None:
                empty.append(name)
        if empty:
            problem = f"no image in {len(empty)} of its class folders, the first {empty[0]!r}"
            raise ConfigError(key, str(root), problem, "remove it or fill it")
        if not classes:
            remedy = (
                "lay the images out as <class>/<image>, or set data.no_labels=true for training"
            )
            raise ConfigError(key, str(root), "no class folders in it", remedy)

    return ImageFiles(open_listing(root, _prefix(root), "classes", walk))


def _prefix(folder: Path) -> str:
    """What paths of files in a folder begin with."""
    return str(folder / "x")[:-1]


def _images_below(folder: Path, root: Path, key: str, seen: Seen) -> Iterator[str]:
    """Image files of a class, folder by folder, in the order of their paths."""
    _refuse_circle(folder, root, key)
    note(seen, folder)
    found = []
    for place, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        for name in folders:
            _refuse_circle(Path(place, name), root, key)
            note(seen, os.path.join(place, name))
        found.append((place, [f for f in files if f.lower().endswith(IMG_EXTENSIONS)]))
    for place, files in sorted(found):
        yield from (os.path.join(place, file) for file in sorted(files))


def _refuse_circle(folder: Path, root: Path, key: str) -> None:
    """Refuses a link to a folder above it, which would make the walk endless."""
    if not folder.is_symlink():
        return
    target = folder.resolve()
    above = (place for place in folder.parents if place.is_relative_to(root))
    if any(place.resolve().is_relative_to(target) for place in above):
        problem = f"{str(folder)!r} is a link to a folder that it lies in, without end"
        raise ConfigError(key, str(root), problem, "remove the link")


def _fail(error: OSError) -> None:
    raise error


def file_list(file: Path, key: str, labelled: bool, *, present: bool) -> ImageFiles:
    """The images in a text file with one line ``path label`` each, in its order.

    Paths are absolute or relative to the list's folder, and may contain spaces. Labels are whole
    numbers from 0 to 999,999, where a negative one means no label (-1), or names, which are
    numbered in sorted order; a list of other numbers is refused. Empty lines and lines that begin
    with ``#`` are ignored. Unless ``labelled``, lines have no label; only if ``present`` is a
    missing file refused.

    Raises:
        ConfigError: the file is no such list, or names a file that does not exist.
        OSError: the list cannot be read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "list.txt"
    >>> size = file.write_text("a.png cat" + chr(10) + "b.png ant" + chr(10))
    >>> images = file_list(file, "data.train_path", True, present=False)
    >>> images.classes, images.targets.tolist()
    (['ant', 'cat'], [1, 0])
    """

    def refusal(problem: str) -> ConfigError:
        remedy = "give a folder, or a text file with a line `path label` for every image"
        return ConfigError(key, str(file), problem, remedy)

    def lines(check: bool) -> Iterator[tuple[Path, str]]:
        # `str.splitlines` would also split at characters that file names may contain.
        with file.open(encoding="utf-8-sig") as text:
            for number, line in enumerate(map(str.strip, text), 1):
                if not line or line.startswith("#"):
                    continue
                name, _, label = (
                    line.replace("\t", " ").rpartition(" ") if labelled else (line, "", "-1")
                )
                name, shown = name.strip(), name.strip()[:200]
                if not name:
                    raise refusal(f"line {number} has no label")
                path = file.parent / name
                if check and present and not os.path.isfile(path):
                    raise refusal(f"line {number} names {shown!r}, which is no file")
                yield path, label

    def walk(seen: Seen, classes: list[str]) -> Iterator[Sample]:
        note(seen, file)
        try:
            # Which numbers labels have is known when all of them are.
            labels = dict.fromkeys(label for _, label in lines(check=True))
        except UnicodeDecodeError:
            raise refusal("a file that is no text") from None
        try:
            targets, names = numbered(labels)
        except ValueError as error:
            raise refusal(str(error)) from None
        classes += names
        yield from ((str(path), targets[label]) for path, label in lines(check=False))

    kind = f"list, labelled={labelled}, present={present}"
    return ImageFiles(open_listing(file, _prefix(file.parent), kind, walk))


def numbered(labels: Collection[str]) -> tuple[dict[str, int], list[str]]:
    """Targets by label, and names of the classes.

    Whole numbers are targets, where a negative one means no label (-1); names are numbered in
    sorted order.

    Raises:
        ValueError: all are numbers, but not of classes.

    >>> numbered(["2", "-7"])
    ({'2': 2, '-7': -1}, ['0', '1', '2'])
    >>> numbered(["2", "cat"])
    ({'2': 0, 'cat': 1}, ['2', 'cat'])
    """
    odd = next((label for label in labels if not _NUMBER.fullmatch(label)), None)
    if odd is None:
        targets = {label: max(int(label), -1) for label in labels}
        return targets, list(map(str, range(max(targets.values(), default=-1) + 1)))
    if all(map(_DECIMAL.fullmatch, labels)):
        raise ValueError(
            f"label {odd[:200]!r} is neither a number up to 999999 without leading zeros nor a name"
        )
    classes = sorted(labels)
    return {name: number for number, name in enumerate(classes)}, classes
