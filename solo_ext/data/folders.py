"""Image files: class folders, one folder without classes, or a text file that lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import Item, load_image

_NUMBER = re.compile(r"0|-?[1-9]\d{0,5}")
"""Labels of this form count as numbers of classes, if all labels of a list have it."""


class ImageFiles(Dataset[Item]):
    """Image files and their targets.

    Args:
        samples: path and target of every image.
        classes: names of the classes by target; empty without labels.

    >>> files = ImageFiles([("ant/0.png", 0), ("bee/0.png", 1)], ["ant", "bee"])
    >>> len(files), files.targets
    (2, [0, 1])
    """

    def __init__(self, samples: list[tuple[str, int]], classes: list[str]) -> None:
        self.samples, self.classes = samples, classes

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Item:
        path, target = self.samples[index]
        return load_image(path), target


class Unlabelled(ImageFiles):
    """All images of one folder, in the order of their names, with target -1."""

    def __init__(self, root: Path) -> None:
        found = (p for p in root.iterdir() if p.suffix.lower() in IMG_EXTENSIONS)
        super().__init__([(str(path), -1) for path in sorted(found) if not path.is_dir()], [])


class ClassFolders(ImageFiles):
    """The images of a folder of class folders, in torchvision's order and numbering.

    An image in a subfolder of a class folder belongs to the class; links to folders are followed.
    Hidden class folders (``.ipynb_checkpoints``), which make torchvision's ``ImageFolder`` fail,
    are left out. ``key`` is the config's, for messages.

    Raises:
        ConfigError: no class folders, one without images, or a link to a folder that contains it.
        OSError: a folder cannot be read.
    """

    def __init__(self, root: Path, key: str) -> None:
        folders = (p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        classes = sorted(p.name for p in folders)
        if not classes:
            raise ConfigError(
                key,
                str(root),
                "no class folders in it",
                "lay the images out as <class>/<image>, or set data.no_labels=true for training",
            )
        files = {name: list(_images_below(root / name, root, key)) for name in classes}
        empty = [name for name in classes if not files[name]]
        if empty:
            problem = f"no image in {len(empty)} of its class folders, the first {empty[0]!r}"
            raise ConfigError(key, str(root), problem, "remove it or fill it")
        samples = [(file, target) for target, name in enumerate(classes) for file in files[name]]
        super().__init__(samples, classes)


def _images_below(folder: Path, root: Path, key: str) -> Iterator[str]:
    """Image files of a class, folder by folder, in the order of their paths."""
    _refuse_circle(folder, root, key)
    found = []
    for place, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        for name in folders:
            _refuse_circle(Path(place, name), root, key)
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


class FileList(ImageFiles):
    """The images in a text file with one line ``path label`` each, in its order.

    Paths are absolute or relative to the list's folder, and may contain spaces. Labels are whole
    numbers from 0 to 999,999, where a negative one means no label (-1), or names, which are
    numbered in sorted order; a list of other numbers is refused. Empty lines and lines that begin
    with ``#`` are ignored. Unless ``labelled``, lines have no label; only if ``present`` is a
    missing file refused.

    Raises:
        ConfigError: the file is no such list, or names a file that does not exist.
        OSError: the list cannot be read.
    """

    def __init__(self, file: Path, key: str, labelled: bool, *, present: bool) -> None:
        def refusal(problem: str) -> ConfigError:
            remedy = "give a folder, or a text file with a line `path label` for every image"
            return ConfigError(key, str(file), problem, remedy)

        try:
            # `str.splitlines` would also split at characters that file names may contain.
            lines = file.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError:
            raise refusal("a file that is no text") from None
        paths, labels = [], []
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            name, _, label = (
                line.replace("\t", " ").rpartition(" ") if labelled else (line, "", "-1")
            )
            if not name.strip():
                raise refusal(f"line {number} has no label")
            paths.append(file.parent / name.strip())
            labels.append(label)
            if present and not os.path.isfile(paths[-1]):
                raise refusal(f"line {number} names {name.strip()[:200]!r}, which is no file")
        odd = next((label for label in labels if not _NUMBER.fullmatch(label)), None)
        if odd is not None and all(label.removeprefix("-").isdecimal() for label in labels):
            raise refusal(
                f"label {odd[:200]!r} is neither a number up to 999999 without leading zeros nor a "
                "name"
            )
        if odd is None:
            targets = [max(int(label), -1) for label in labels]
            classes = [str(number) for number in range(max(targets, default=-1) + 1)]
        else:
            classes = sorted(set(labels))
            place = {name: number for number, name in enumerate(classes)}
            targets = [place[label] for label in labels]
        super().__init__([(str(p), t) for p, t in zip(paths, targets, strict=True)], classes)
