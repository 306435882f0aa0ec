"""Folders of images whose names are classes."""

from __future__ import annotations

from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from solo_ext.core.errors import ConfigError, nearest
from solo_ext.data.images import class_names
from solo_ext.data.reading import Images


def same_classes(train: Images, val: Images, val_path: str) -> None:
    """Refuses class folders of validation whose numbers mean other classes than in training.

    The last classes may be missing in validation, which shifts no number.

    Raises:
        ConfigError: a class that training lacks, or one missing before others.
    """
    ours, theirs = class_names(train), class_names(val)
    extra = sorted(set(theirs) - set(ours))
    if extra:
        raise ConfigError(
            "data.val_path",
            val_path,
            f"class {extra[0]!r} is not among the training classes",
            nearest(extra[0], ours),
        )
    if theirs != ours[: len(theirs)]:
        missing = sorted(set(ours) - set(theirs))
        raise ConfigError(
            "data.val_path",
            val_path,
            f"class {missing[0]!r} is missing, which would shift the labels",
            "add it, a single image is enough",
        )


def has_class_folders(root: Path) -> bool:
    """Whether a path is of a folder whose folders have images in them."""
    root = root.expanduser()
    if not root.is_dir():
        return False
    folders = (p for p in root.iterdir() if p.is_dir())
    return any(file.suffix.lower() in IMG_EXTENSIONS for f in folders for file in f.iterdir())
