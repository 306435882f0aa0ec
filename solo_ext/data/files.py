"""The files behind a data set, for readers that open them themselves."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from solo_ext.core.errors import ConfigError
from solo_ext.data.dali_errors import cannot_skip
from solo_ext.data.datasets import Unlabelled
from solo_ext.data.images import Images
from solo_ext.data.unreadable import Skipping


def files_of(images: Images) -> list[str]:
    """Path of every sample, in the order of the data set's indices.

    Raises:
        ConfigError: a data set that is no set of files, or of which unreadable ones are skipped.
    """
    source: Any = images
    if isinstance(source, Skipping):
        raise cannot_skip()
    if isinstance(source, Subset):
        files = files_of(source.dataset)  # type: ignore[arg-type]
        return [files[index] for index in source.indices]
    if isinstance(source, Unlabelled):
        return [str(path) for path in source.files]
    if hasattr(source, "samples"):
        return [str(path) for path, _ in source.samples]
    raise ConfigError(
        "data.format",
        "dali",
        f"DALI reads image files, and {type(source).__name__} has none",
        "use class folders or a list of files, or data.format=image_folder",
    )
