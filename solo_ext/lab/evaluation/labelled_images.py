"""Images that an evaluation can use."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data import Dataset, Subset

from solo_ext.core.errors import ConfigError
from solo_ext.data.images import targets_of
from solo_ext.data.reading import Images, Skipping


def labelled_images(images: Images, key: str, path: str | None) -> Images:
    """Leaves out images without a label, such as those that STL-10 has beside its training images.

    Args:
        images: as :func:`solo_ext.data.images.open_images` gives them.
        key: where they come from, such as ``data.train_path``.
        path: its value.

    Returns:
        The same object where all have one.

    Raises:
        ConfigError: none has one.
    """
    targets = targets_of(images)
    if all(target >= 0 for target in targets):
        return images
    kept = [index for index, target in enumerate(targets) if target >= 0]
    if not kept:
        raise ConfigError(
            key,
            path,
            f"none of its {len(images)} images has a label, and an evaluation needs some",
            "give class folders with data.train_path=... data.val_path=...",
        )
    if isinstance(images, Skipping):
        return cast(Images, Skipping(cast(Images, Subset(images.images, kept))))  # type: ignore[arg-type]
    return cast(Images, Subset(cast(Dataset[Any], images), kept))
