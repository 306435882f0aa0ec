"""A user's pictures: where they lie, how many and how large they are, and what cannot be read."""

from __future__ import annotations

import hashlib
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from solo_ext.config.schema import Images
from solo_ext.core.errors import ConfigError
from solo_ext.data.folders import are_plainly_classes, list_has_labels
from solo_ext.data.images import class_names, files_of, open_images
from solo_ext.data.reading import FORMATS, UnreadableImage, read_file, unwrap_dataset

LEAST = 16
"""Fewest images that a run is started with."""
SAMPLE = 512
"""Images whose headers are read, evenly spaced over all."""
_MOST_HEADERS = 200_000
_VALIDATION = ("val", "valid", "validation", "test")


@dataclass(frozen=True)
class Pictures:
    """What is known of a user's images before a run.

    Attributes:
        data: where they lie, as the keys of a config's section ``data``.
        name: the first folder's name.
        count: how many they are, without held-out ones of a folder of their own.
        hidden: how many hidden image files were passed over.
        classes: number of class folders; 0 without labels.
        side: median of the shorter sides of the sample, in pixels.
        alike: height and width if all have the same, else ``None``.
        unreadable: images of the sample that cannot be read, and why.
        looked_at: number of images of the sample.

    >>> from solo_ext.data.digits import digits_folder
    >>> found = look_at([str(digits_folder("train"))])
    >>> found.count, found.classes, found.side, found.alike
    (1400, 10, 32, (32, 32))
    """

    data: dict[str, Any]
    name: str
    count: int
    hidden: int
    classes: int
    side: int
    alike: tuple[int, int] | None
    unreadable: dict[str, str]
    looked_at: int = SAMPLE


def look_at(images: Sequence[str], no_labels: bool | None = None) -> Pictures:
    """Lists a user's images, and reads the headers of a sample.

    Args:
        images: folders of any depth, or one file that lists images.
        no_labels: whether class folders and a list's labels are ignored; ``None`` decides.

    Raises:
        UserError: there are no images, fewer than :data:`LEAST`, none that can be read, or all are
            copies of one.

    >>> look_at(["/nowhere"])
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: IMAGES='/nowhere': no such folder; give a folder of ...
    """
    roots = [Path(os.path.abspath(os.path.expanduser(path))) for path in images]
    if not roots:
        raise ConfigError("IMAGES", None, "no folder", "give a folder of images")
    for path, root in zip(images, roots, strict=True):
        if not path.strip() or not root.exists():
            remedy = "give a folder of images, or a file that lists some"
            raise ConfigError("IMAGES", path, "no such folder", remedy)
        if root.is_file() and len(roots) > 1:
            raise ConfigError("IMAGES", path, "a file beside others", "give folders, or one list")
    data = _where(roots, no_labels)
    try:
        section = Images(dataset="custom", unreadable="skip", **data)
        listed = open_images(section, "train")
    except ConfigError as error:
        # The user has named folders, and no key of a config.
        raise ConfigError("IMAGES", error.value, error.problem, error.remedy) from None
    files = files_of(listed)
    sample = files[:: max(1, len(files) // SAMPLE)][:SAMPLE]
    sizes, unreadable = _headers(sample, images)
    _refuse_few(len(files) - len(unreadable), images)
    shorter = [min(size) for size in sizes]
    same = len(set(sizes)) == 1 and len(files) <= _MOST_HEADERS
    same = same and all(_size(file) in (sizes[0], None) for file in files)
    return Pictures(
        data=data,
        name=re.sub(r"[^\w.-]+", "-", roots[0].stem).strip("-.") or "images",
        count=len(files),
        hidden=getattr(unwrap_dataset(listed, ())[0], "hidden", 0),
        classes=0 if data["no_labels"] else len(class_names(listed)),
        side=round(statistics.median(shorter)),
        alike=(sizes[0][1], sizes[0][0]) if same else None,
        unreadable=unreadable,
        looked_at=len(sample),
    )


def _where(roots: Sequence[Path], no_labels: bool | None) -> dict[str, Any]:
    """The keys of ``data`` that say where images lie and whether their folders are classes."""
    if no_labels or len(roots) > 1:
        paths = [str(root) for root in roots]
        return {
            "train_path": paths if len(paths) > 1 else paths[0],
            "no_labels": no_labels is not False,
        }
    (root,) = roots
    if root.is_dir() and (splits := _splits(root)):
        return {"train_path": str(splits[0]), "val_path": str(splits[1]), "no_labels": False}
    plain = list_has_labels(root) if root.is_file() else are_plainly_classes(root)
    labelled = no_labels is False or plain
    return {"train_path": str(root), "no_labels": not labelled}


def _refuse_few(count: int, images: Sequence[str]) -> None:
    if count < LEAST:
        what = "one image" if count == 1 else f"{count} images"
        problem = f"{what}, and methods compare images with each other"
        raise ConfigError("IMAGES", " ".join(images), problem, f"give {LEAST} or more")


def _headers(
    sample: Sequence[str], images: Sequence[str]
) -> tuple[list[tuple[int, int]], dict[str, str]]:
    """Width and height of a sample's images, and why others of it cannot be read.

    Raises:
        UserError: none can be read, or all are copies of one.
    """
    sizes, unreadable, contents = [], {}, set()
    for file in sample:
        try:
            content = read_file(file)
        except UnreadableImage as error:
            unreadable[file] = error.reason
            continue
        size = _size(file)
        if size is None:
            unreadable[file] = "it is no image" if content else "it is empty"
        else:
            sizes.append(size)
            contents.add(hashlib.sha256(content).digest())
    if sample and not sizes:
        problem = f"none of {len(sample)} images can be read, the first {sample[0]!r}"
        raise ConfigError("IMAGES", " ".join(images), problem, "give images")
    if len(sizes) > 1 and len(contents) == 1:
        problem = f"its {len(sizes)} images are copies of one"
        raise ConfigError("IMAGES", " ".join(images), problem, "give images that differ")
    return sizes, unreadable


def _size(file: str) -> tuple[int, int] | None:
    try:
        with Image.open(file, formats=FORMATS) as image:
            return image.size
    except Exception:
        # Damaged files make PIL raise errors of nearly every type.
        return None


def _splits(root: Path) -> tuple[Path, Path] | None:
    """The folders of training and validation in a folder that holds both, of the same classes."""
    train = root / "train"
    found = [root / name for name in _VALIDATION if (root / name).is_dir()]
    if not train.is_dir() or len(found) != 1 or not are_plainly_classes(train):
        return None
    held = {p.name for p in found[0].iterdir() if p.is_dir() and not p.name.startswith(".")}
    classes = {p.name for p in train.iterdir() if p.is_dir() and not p.name.startswith(".")}
    return (train, found[0]) if held and held <= classes else None
