"""Images in one HDF5 file, in the layout that solo-learn's main branch reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from solo_ext.core.errors import ConfigError
from solo_ext.data.fingerprint import file_state
from solo_ext.data.formats.imagenet100 import IMAGENET100
from solo_ext.data.reading import NOT_THE_IMAGES_FAULT, UnreadableImage, decode_image

_LAYOUT = "lay it out as <class>/<image>, each image the bytes of its file (uint8)"
_DAMAGED = (OSError, KeyError, TypeError, AttributeError, RuntimeError, ValueError)
"""What h5py raises for a file of which parts are overwritten, missing or named oddly."""


class H5Images(Dataset[tuple[Image.Image, int]]):
    """Encoded images ``<class>/<image>``, each a one-dimensional array of bytes.

    Classes and images are in the order of their names. The file is opened in the process that
    reads it, so that loaders may start their workers in any way.

    Attributes:
        classes: names by target.
        targets: (n,), int64.

    Args:
        path: the file.
        only: classes to keep, where the file has all of them and more.

    Raises:
        OSError: the file cannot be opened as HDF5.
        KeyError, TypeError, AttributeError, RuntimeError, ValueError: it is damaged, or a name in
            it is no text.
        ImportError: h5py is not installed.
    """

    def __init__(self, path: Path, only: tuple[str, ...] = ()) -> None:
        import h5py

        self.path = str(path)
        with h5py.File(self.path, "r", locking="best-effort") as file:
            groups = sorted(name for name in file if isinstance(file[name], h5py.Group))
            for name in groups:
                if file[name].file.filename != file.filename:
                    raise ValueError(f"{name!r} is a link to another file")
            self.classes = sorted(only) if only and set(only) <= set(groups) else groups
            names = [sorted(file[name]) for name in self.classes]
        # One array of bytes, where a list of a million strings would be copied by each worker.
        self._names = np.array([n.encode() for of_class in names for n in of_class], dtype=bytes)
        self.targets = np.repeat(np.arange(len(names)), [len(n) for n in names])
        self._file: tuple[int, Any] | None = None

    @property
    def fingerprint(self) -> str:
        """Changes with the file and with the classes taken out of it."""
        return f"{file_state(Path(self.path))} {self.classes}"

    def __len__(self) -> int:
        return len(self.targets)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        target = int(self.targets[index])
        name = self.name_of(index)
        try:
            held = self._opened()[self.classes[target]][self._names[index]]
            stored: Any = None if self._is_elsewhere(held) else held[()]
        except _DAMAGED as error:
            if isinstance(error, OSError) and error.errno in NOT_THE_IMAGES_FAULT:
                raise
            raise UnreadableImage(name, str(error) or type(error).__name__) from None
        if getattr(stored, "dtype", None) != np.uint8 or stored.ndim != 1:
            raise UnreadableImage(name, "it is not the bytes of an image file (uint8, 1-D)")
        return decode_image(stored.tobytes(), name), target

    def name_of(self, index: int) -> str:
        """``<file>:<class>/<image>``."""
        return f"{self.path}:{self.classes[self.targets[index]]}/{self._names[index].decode()}"

    def _is_elsewhere(self, held: Any) -> bool:
        """Whether bytes come out of another file, which HDF5 can make any file of the machine."""
        linked = held.file.filename != self._opened().filename
        return linked or bool(getattr(held, "external", None) or getattr(held, "is_virtual", False))

    def _opened(self) -> Any:
        import h5py

        if self._file is None or self._file[0] != os.getpid():
            if self._file is not None:
                # Inherited by a fork. As long as it is open here, HDF5 gives the same descriptor
                # for the same file, whose place in the file all processes would move.
                self._file[1].close()
            self._file = os.getpid(), h5py.File(self.path, "r", locking="best-effort")
        return self._file[1]


def open_h5(path: str, key: str, dataset: str) -> H5Images:
    """Opens ``data.format: h5``.

    Args:
        path: the file.
        key: key of the path in the config.
        dataset: ``data.dataset``; ``imagenet100`` takes its classes out of a file of ImageNet.

    Raises:
        ConfigError: h5py or the file is missing, or the file is damaged or of another layout.
        OSError: the system does not let it be opened.
    """
    place = Path(path).expanduser()
    if not place.is_file():
        found = "a folder, not an HDF5 file" if place.is_dir() else "no such file"
        raise ConfigError(key, path, found, "give the .h5 file of the split")
    try:
        images = H5Images(place, IMAGENET100 if dataset == "imagenet100" else ())
    except ImportError:
        raise ConfigError(
            "data.format", "h5", "h5py is not installed", "pip install 'solo-ext[h5]'"
        ) from None
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno:
            # Of the file as a whole: no permission, too many are open.
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, OSError):
            raise ConfigError(key, path, f"not an HDF5 file ({said})", "give a .h5 file") from None
        raise ConfigError(
            key, path, f"a damaged HDF5 file, or one of another layout ({said})", _LAYOUT
        ) from None
    if not len(images):
        raise ConfigError(
            key,
            path,
            "no images in the groups of this file" if images.classes else "no groups in this file",
            _LAYOUT,
        )
    return images
