"""Image files: class folders, one folder without classes, or a text file that lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import Item, load_image

_LIST_FORMAT = "give a folder, or a text file with a line `path label` for every image"
_LONGEST_NAME = 120
_MOST_CLASSES = 100_000
"""Most classes that a list's numbers may imply if it has fewer images than that."""


class ImageFiles(Dataset[Item]):
    """Image files and their targets.

    Attributes:
        samples: path and target of every image.
        classes: names of the classes by target; empty without labels.
        targets: targets of all samples.
    """

    samples: list[tuple[str, int]]
    classes: list[str]

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Item:
        path, target = self.samples[index]
        return load_image(path), target


class Unlabelled(ImageFiles):
    """All images of one folder, in the order of their names, with target -1.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        found = (p for p in root.iterdir() if p.suffix.lower() in IMG_EXTENSIONS)
        self.samples = [(str(path), -1) for path in sorted(p for p in found if not p.is_dir())]
        self.classes = []


class ClassFolders(ImageFiles):
    """The images of a folder of class folders, in torchvision's order and numbering.

    An image in a subfolder of a class folder belongs to the class; links to folders are followed.
    Hidden class folders (``.ipynb_checkpoints``), which make torchvision's ``ImageFolder`` fail,
    are left out.

    Args:
        root: the folder.
        key: key of the config, for messages.

    Raises:
        ConfigError: no class folders, one without images, or a link to a folder that contains it.
        OSError: a folder cannot be read.
    """

    def __init__(self, root: Path, key: str) -> None:
        folders = (p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        self.classes = sorted(p.name for p in folders)
        if not self.classes:
            raise ConfigError(
                key,
                str(root),
                "no class folders in it",
                "lay the images out as <class>/<image>, or set data.no_labels=true for training",
            )
        of_class = [list(_images(root, name, key)) for name in self.classes]
        empty = [repr(n) for n, files in zip(self.classes, of_class, strict=True) if not files]
        if empty:
            problem = f"no image in the class folder{'s' if len(empty) > 1 else ''}"
            named = ", ".join(empty[:10]) + (", ..." if len(empty) > 10 else "")
            raise ConfigError(key, str(root), f"{problem} {named}", "remove it or fill it")
        self.samples = [(file, target) for target, files in enumerate(of_class) for file in files]


def _images(root: Path, name: str, key: str) -> Iterator[str]:
    """Image files of a class, folder by folder, in the order of their paths."""
    _refuse_a_circle(root / name, root, key)
    found = []
    for place, folders, files in os.walk(root / name, onerror=_fail, followlinks=True):
        for folder in folders:
            _refuse_a_circle(Path(place, folder), root, key)
        found.append((place, [f for f in files if f.lower().endswith(IMG_EXTENSIONS)]))
    for place, files in sorted(found):
        yield from (os.path.join(place, file) for file in sorted(files))


def _refuse_a_circle(folder: Path, root: Path, key: str) -> None:
    """Refuses a link to a folder above it, which would make the walk endless."""
    if not folder.is_symlink():
        return
    target, above = folder.resolve(), folder
    while above != root:
        above = above.parent
        if above.resolve().is_relative_to(target):
            raise ConfigError(
                key,
                str(root),
                f"{str(folder)!r} is a link to a folder that it lies in, without end",
                "remove the link",
            )


def _fail(error: OSError) -> None:
    raise error


class FileList(ImageFiles):
    """The images in a text file with one line ``path label`` each, in its order.

    Paths are absolute or relative to the list's folder, and may contain spaces. Labels are whole
    numbers from 0, where a negative one means no label (-1), or names, which are numbered in sorted
    order. Empty lines and lines that begin with ``#`` are ignored.

    Args:
        file: the list.
        key: key of the config, for messages.
        labelled: whether lines end in a label; if not, targets are -1.
        present: whether a missing file is refused.

    Raises:
        ConfigError: the file is no such list, or names a file that does not exist.
        OSError: the list cannot be read.
    """

    def __init__(
        self, file: Path, key: str, labelled: bool = True, *, present: bool = True
    ) -> None:
        self._file, self._key, self._present = file, key, present
        rows = [self._row(number, line, labelled) for number, line in self._lines()]
        targets = self._numbered([label for _, label in rows if label is not None])
        self.samples = [
            (str(path), -1 if label is None else targets[label]) for path, label in rows
        ]

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(self._key, str(self._file), problem, _LIST_FORMAT)

    def _lines(self) -> Iterator[tuple[int, str]]:
        try:
            text = self._file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise self._refusal("a file that is no text") from None
        # `str.splitlines` also splits at characters that file names may contain.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and not line.strip().startswith("#"):
                yield number, line.strip()

    def _row(self, number: int, line: str, labelled: bool) -> tuple[Path, str | None]:
        name, label = line, None
        if labelled:
            name, _, label = line.replace("\t", " ").rpartition(" ")
            if not name.strip():
                raise self._refusal(f"line {number} has no label")
        path = self._file.parent / name.strip()
        if self._present:
            self._refuse_missing(path, number, name.strip())
        return path, label

    def _refuse_missing(self, path: Path, number: int, name: str) -> None:
        reason = ""
        try:
            if path.is_file():
                return
        except OSError as error:
            reason = f" ({error.strerror})"
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        raise self._refusal(f"line {number} names {shown!r}, which is no file{reason}")

    def _numbered(self, labels: list[str]) -> dict[str, int]:
        """Returns the target of every label; sets ``classes``."""
        found = set(labels)
        # Numbers with thousands of digits count as names, because `int` refuses them.
        if not all(n.removeprefix("-").isdecimal() and len(n) <= _LONGEST_NAME for n in found):
            self.classes = sorted(found)
            return {name: number for number, name in enumerate(self.classes)}
        odd = min((label for label in found if label != str(int(label))), default=None)
        if odd is not None:
            raise self._refusal(
                f"label {odd!r} is neither a whole number nor a name: write it without leading "
                "zeros, or with a letter"
            )
        targets = {label: max(int(label), -1) for label in found}
        classes = max(targets.values(), default=-1) + 1
        if classes > max(_MOST_CLASSES, len(labels)):
            raise self._refusal(
                f"label '{classes - 1}' asks for {classes} classes of {len(labels)} images: "
                "number them from 0, or write names with a letter"
            )
        self.classes = [str(n) for n in range(classes)]
        return targets
