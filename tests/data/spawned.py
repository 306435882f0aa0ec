"""What a worker that is spawned reads; in a module that it can find by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset


class Everything(Dataset[Any]):
    """Items of several data sets, one after another."""

    def __init__(self, parts: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        self.parts = [(dataset, key) for dataset, keys in parts for key in keys]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Any:
        dataset, key = self.parts[index]
        return dataset[key]


def as_they_are(items: list[Any]) -> list[Any]:
    """A collate function."""
    return items
