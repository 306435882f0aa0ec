"""Images in one HDF5 file, in the layout that solo-learn's main branch reads."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from solo_ext.core.errors import ConfigError, first_line
from solo_ext.data.reading import EncodedImages, file_state, image_errors

_LAYOUT = "lay it out as <class>/<image>, each image the bytes of its file (uint8)"
_DAMAGED = (OSError, KeyError, TypeError, AttributeError, RuntimeError, ValueError)
"""Errors of h5py for a file with parts overwritten, missing or badly named."""


class H5Images(EncodedImages):
    """Encoded images ``<class>/<image>``, each a one-dimensional array of bytes.

    Classes and images are in the order of their names. Every process opens the file for itself, so
    loaders may start their workers in any way. If the file has all the classes ``only``, others are
    left out. Without ``labelled``, targets are -1.

    Raises:
        OSError, KeyError, TypeError, AttributeError, RuntimeError, ValueError: the file is no HDF5
            file, is damaged, or contains a name that is not text.
    """

    def __init__(self, path: Path, only: tuple[str, ...] = (), *, labelled: bool = True) -> None:
        import h5py

        self.path = str(path)
        with _open(self.path) as file:
            for name in file:
                _refuse_link(file, name)
            groups = sorted(name for name in file if isinstance(file[name], h5py.Group))
            self._groups = sorted(only) if only and set(only) <= set(groups) else groups
            names = [sorted(file[name]) for name in self._groups]
        for name, images in zip(self._groups, names, strict=True):
            if not images:
                raise ValueError(f"its class {name!r} has no images; remove or fill it")
        # Use one array of bytes: each worker would copy a list of a million strings.
        self._names = np.array([n.encode() for of_class in names for n in of_class], dtype=bytes)
        self._group = np.repeat(np.arange(len(names)), [len(n) for n in names])
        self.classes = self._groups if labelled else []
        self.targets = self._group if labelled else np.full(len(self._names), -1)
        self._file: tuple[int, Any] | None = None

    @property
    def fingerprint(self) -> str:
        return f"{file_state(self.path)} {self.classes}"

    @property
    def names_digest(self) -> str:
        """Changes with the names and classes of the images, wherever the file lies."""
        digest = hashlib.sha256(repr([self._groups, self.classes]).encode())
        digest.update(self._group.tobytes() + self._names.tobytes())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def encoded(self, index: int) -> bytes:
        with image_errors(lambda: self.name_of(index)):
            group, image = self._opened()[self._group_of(index)], self._names[index]
            _refuse_link(group, image)
            held = group[image]
            # External and virtual storage may name any file on the machine.
            external = getattr(held, "external", None) or getattr(held, "is_virtual", False)
            stored: Any = None if external else held[()]
            if getattr(stored, "dtype", None) != np.uint8 or stored.ndim != 1:
                raise ValueError("it is not the bytes of an image file (uint8, 1-D)")
            return bytes(stored.tobytes())

    def name_of(self, index: int) -> str:
        return f"{self.path}:{self._group_of(index)}/{self._names[index].decode()}"

    def _group_of(self, index: int) -> str:
        return str(self._groups[self._group[index]])

    def _opened(self) -> Any:
        if self._file is None or self._file[0] != os.getpid():
            if self._file is not None:
                # A forked process inherits this handle. While it is open, HDF5 would reuse its
                # descriptor for the same file, and all processes would share one file position.
                self._file[1].close()
            self._file = os.getpid(), _open(self.path)
        return self._file[1]


def _open(path: str) -> Any:
    import h5py

    return h5py.File(path, "r", locking="best-effort")


def _refuse_link(group: Any, name: str | bytes) -> None:
    """Refuses links, which may lead to any file on the machine or to an endless pipe."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        shown = name.decode() if isinstance(name, bytes) else name
        raise ValueError(f"{shown!r} is a link")


def open_h5(path: str, key: str, dataset: str, *, labelled: bool) -> H5Images:
    """Opens ``data.format: h5``; ``imagenet100`` selects its classes from a file of ImageNet.

    Raises:
        ConfigError: h5py or the file is missing, or the file is damaged or has another layout.
        OSError: the system does not allow opening the file.

    >>> open_h5("nowhere.h5", "data.train_path", "custom", labelled=True)
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.train_path='nowhere.h5': no such file; give the .h5...
    """
    place = Path(path).expanduser()
    if not place.is_file():
        found = "a folder, not an HDF5 file" if place.is_dir() else "no such file"
        raise ConfigError(key, path, found, "give the .h5 file of the split")
    try:
        images = H5Images(place, IMAGENET100 if dataset == "imagenet100" else (), labelled=labelled)
    except ImportError:
        raise ConfigError(
            "data.format", "h5", "h5py is not installed", "pip install 'solo-ext[h5]'"
        ) from None
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno:
            # The system refused: no permission, or too many open files.
            raise
        problem = f"not an HDF5 file, or damaged ({first_line(error)})"
        raise ConfigError(key, path, problem, _LAYOUT) from None
    if not len(images):
        raise ConfigError(key, path, "no images in the groups of this file", _LAYOUT)
    return images


_WORDNET_IDS = """
n01558993 n01692333 n01729322 n01735189 n01749939 n01773797 n01820546 n01855672 n01978455
n01980166 n01983481 n02009229 n02018207 n02085620 n02086240 n02086910 n02087046 n02089867
n02089973 n02090622 n02091831 n02093428 n02099849 n02100583 n02104029 n02105505 n02106550
n02107142 n02108089 n02109047 n02113799 n02113978 n02114855 n02116738 n02119022 n02123045
n02138441 n02172182 n02231487 n02259212 n02326432 n02396427 n02483362 n02488291 n02701002
n02788148 n02804414 n02859443 n02869837 n02877765 n02974003 n03017168 n03032252 n03062245
n03085013 n03259280 n03379051 n03424325 n03492542 n03494278 n03530642 n03584829 n03594734
n03637318 n03642806 n03764736 n03775546 n03777754 n03785016 n03787032 n03794056 n03837869
n03891251 n03903868 n03930630 n03947888 n04026417 n04067472 n04099969 n04111531 n04127249
n04136333 n04229816 n04238763 n04336792 n04418357 n04429376 n04435653 n04485082 n04493381
n04517823 n04589890 n04592741 n07714571 n07715103 n07753275 n07831146 n07836838 n13037406
n13040303
"""
IMAGENET100 = tuple(_WORDNET_IDS.split())
"""The classes of ImageNet-100: the WordNet ids of Tian et al. (ECCV 2020, arXiv 1906.05849)."""
