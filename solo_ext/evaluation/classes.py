"""Whether two folders of images number their classes alike."""

from __future__ import annotations

from solo_ext.data.datasets import class_names
from solo_ext.data.images import Images
from solo_ext.errors import ConfigError, nearest


def same_classes(train: Images, val: Images, val_path: str) -> None:
    """Refuses class folders of validation whose numbers mean other classes than in training.

    Raises:
        ConfigError: a class that only one of the two has.
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
    if ours != theirs:
        missing = sorted(set(ours) - set(theirs))
        raise ConfigError(
            "data.val_path",
            val_path,
            f"class folder {missing[0]!r} is missing, which would shift the labels",
            "add the folder, it may hold a single image",
        )
