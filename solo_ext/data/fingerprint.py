"""Telling whether images on disk are still the same, without reading them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from solo_ext.data.images import Images


def images_fingerprint(images: Images) -> str | None:
    """A digest that changes with the files of a data set, their order, and their classes.

    Files count by path, size and time of change. A data set that does not lie in files may have
    an attribute ``fingerprint``, a text.

    Args:
        images: as :func:`solo_ext.data.datasets.open_images` gives them.

    Returns:
        Hex digits; ``None`` where nothing tells what the images are, and where some may be skipped.
    """
    return _digest(images, _entries)


def names_fingerprint(images: Images) -> str | None:
    """A digest of which images a data set has, in which order and of which classes.

    Unlike :func:`images_fingerprint` it is the same for a copy of the files elsewhere, and looks
    at no file.

    Args:
        images: as :func:`solo_ext.data.datasets.open_images` gives them.

    Returns:
        Hex digits; ``None`` where nothing tells what the images are.
    """
    return _digest(images, _names, wrapped=True)


def _digest(
    images: Images, entries_of: Callable[[Any], Iterable[Any] | None], wrapped: bool = False
) -> str | None:
    """Of the entries of what lies below all subsets, and wrappers if so, and of these."""
    digest = hashlib.sha256()
    source: Any = images
    while (entries := entries_of(source)) is None:
        if isinstance(source, Subset):
            digest.update(repr(list(source.indices)).encode())
            source = source.dataset
        elif wrapped and isinstance(getattr(source, "images", None), Dataset):
            # Those that may be skipped, or have no labels, are known by the images below.
            digest.update(type(source).__name__.encode())
            source = source.images
        else:
            return None
    digest.update(type(source).__name__.encode())
    for entry in entries:
        # A name on disk need not be UTF-8.
        digest.update(os.fsencode(f"{entry}\n"))
    return digest.hexdigest()


def _names(source: Any) -> Iterable[Any] | None:
    if hasattr(source, "samples"):
        names = _from_root([os.fspath(path) for path, _ in source.samples])
        return zip(names, (target for _, target in source.samples), strict=True)
    if hasattr(source, "files"):
        return _from_root([os.fspath(path) for path in source.files])
    if isinstance(getattr(source, "fingerprint", None), str):
        return [source.fingerprint]
    if hasattr(source, "base_folder"):
        return [source.base_folder, getattr(source, "split", getattr(source, "train", None))]
    return None


def _from_root(paths: list[str]) -> list[str]:
    """The paths without the folder that they all lie in."""
    split = [os.path.split(path) for path in paths]
    # Of folders there are few: a million files are named in a second.
    folders = {folder: os.path.abspath(folder) for folder, _ in split}
    root = len(os.path.commonpath(folders.values())) if folders else 0
    within = {folder: whole[root:].lstrip(os.sep) for folder, whole in folders.items()}
    return [os.path.join(within[folder], name) for folder, name in split]


def _entries(source: Any) -> Iterable[str] | None:
    own = getattr(source, "fingerprint", None)
    if isinstance(own, str):
        return [own]
    if hasattr(source, "samples"):
        return (f"{file_state(Path(path))} {target}" for path, target in source.samples)
    if hasattr(source, "files"):
        return (file_state(Path(path)) for path in source.files)
    if hasattr(source, "base_folder") and hasattr(source, "root"):
        # torchvision's data sets: a few large files, and an argument that names the split.
        folder = Path(source.root) / source.base_folder
        split = getattr(source, "split", getattr(source, "train", None))
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return [str(split), *map(file_state, files)]
    return None


def file_state(path: Path) -> str:
    """Path, size and time of change of a file."""
    try:
        stat = path.stat()
    except OSError as error:
        # Whoever reads it will say so.
        return f"{path.absolute()} {type(error).__name__}"
    return f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}"
