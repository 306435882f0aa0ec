"""Folders of images whose names are classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import load_image


class ClassFolders(Dataset[tuple[Image.Image, int]]):
    """The images of a folder of class folders, in torchvision's order and numbering.

    An image in a folder of a class folder belongs to the class, links to folders are followed.
    Hidden class folders (``.ipynb_checkpoints``) are left out, where torchvision's ``ImageFolder``
    ends.

    Args:
        root: the folder.
        key: of the config, for messages.

    Attributes:
        samples: path and target of every image.
        classes: names of the classes, sorted.
        targets: of all samples.

    Raises:
        ConfigError: no class folders, one without an image, or a link to a folder that it is in.
        OSError: a folder that cannot be read.
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
        self.samples: list[tuple[str, int]] = []
        empty = []
        for target, name in enumerate(self.classes):
            held = len(self.samples)
            self.samples += ((file, target) for file in _images(root, name, key))
            if len(self.samples) == held:
                empty.append(name)
        if empty:
            problem = f"no image in the class folder{'s' if len(empty) > 1 else ''}"
            named = ", ".join(map(repr, empty[:10])) + (", ..." if len(empty) > 10 else "")
            raise ConfigError(key, str(root), f"{problem} {named}", "remove it or fill it")
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, target = self.samples[index]
        return load_image(path), target


def _images(root: Path, name: str, key: str) -> Iterator[str]:
    """Image files of a class, folder by folder in the order of their paths."""
    _refuse_a_circle(root / name, root, key)
    found = []
    for place, folders, files in os.walk(root / name, onerror=_fail, followlinks=True):
        for folder in folders:
            _refuse_a_circle(Path(place, folder), root, key)
        found.append((place, [file for file in files if _is_image(file)]))
    for place, files in sorted(found):
        yield from (os.path.join(place, file) for file in sorted(files))


def _refuse_a_circle(folder: Path, root: Path, key: str) -> None:
    """Refuses a link to a folder that the way to it goes through: the same images once more."""
    if not folder.is_symlink():
        return
    target, way = folder.resolve(), folder
    while way != root:
        way = way.parent
        if way.resolve().is_relative_to(target):
            raise ConfigError(
                key,
                str(root),
                f"{str(folder)!r} is a link to a folder that it lies in, without end",
                "remove the link",
            )


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)


def _fail(error: OSError) -> None:
    raise error
