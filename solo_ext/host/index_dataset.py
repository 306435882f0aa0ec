"""Data sets that return the index of each sample."""

from __future__ import annotations

import importlib
from typing import Any

from torch.utils.data import Dataset


def dataset_with_index(dataset_class: type[Dataset[Any]]) -> type[Dataset[Any]]:
    """Subclass whose items are ``(index, *item)``, and whose instances can be pickled.

    A stand-in for solo-learn's function of this name, which returns a class that no spawned
    worker can find again.

    Args:
        dataset_class: a map-style data set whose items are tuples.
    """

    def getitem(self: Any, index: int) -> tuple[Any, ...]:
        return (index, *dataset_class.__getitem__(self, index))

    def reduce(self: Any) -> tuple[Any, ...]:
        return _rebuild, (_Release(), dataset_class), self.__dict__

    body = {"__getitem__": getitem, "__reduce__": reduce, "__module__": dataset_class.__module__}
    return type(f"{dataset_class.__name__}WithIndex", (dataset_class,), body)


class _Release:
    """Loads the release when it is unpickled: its classes cannot be imported before."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_release, ()


def _load_release() -> None:
    # By name, for the package imports this module.
    host = importlib.import_module("solo_ext.host")
    if host.detect().generation == "1.0.2":
        host.load()


def _rebuild(_: None, dataset_class: type[Dataset[Any]]) -> Any:
    indexed = dataset_with_index(dataset_class)
    return indexed.__new__(indexed)
