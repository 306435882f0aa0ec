"""Numbers that others published; facts of ``reported.csv``, never mixed with measured ones."""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from solo_ext.core.errors import ConfigError, nearest
from solo_ext.lab.experiments.settings import Reported

_FILE = Path(__file__).with_name("reported.csv")


class PublishedNumber(NamedTuple):
    """One line of ``reported.csv``, as it was published; what was not published is empty.

    Attributes:
        registered: the name in solo-learn's registry, where it is the same method.
        source: repository, commit and file.
    """

    library: str
    dataset: str
    method: str
    registered: str
    backbone: str
    batch: str
    epochs: str
    knn_top1: str
    knn_top5: str
    linear_top1: str
    linear_top5: str
    finetune_top1: str
    time_min: str
    peak_gpu_gb: str
    protocol: str
    hardware: str
    seeds: str
    note: str
    source: str


@functools.cache
def published() -> tuple[PublishedNumber, ...]:
    """Every published number."""
    with _FILE.open(newline="") as file:
        return tuple(PublishedNumber(**line) for line in csv.DictReader(file))


def selected(wanted: Reported, key: str = "reported") -> list[PublishedNumber]:
    """The numbers whose data set, backbone and epochs are the wanted ones; null takes any.

    Args:
        wanted: of the settings of a data set.
        key: dotted key of ``wanted``, for the error.

    Raises:
        ConfigError: there is none.
    """
    found: list[PublishedNumber] = list(published())
    for field, value in wanted.model_dump(exclude_none=True).items():
        held = _of(found, field)
        found = [number for number in found if getattr(number, field) == str(value)]
        if not found:
            raise ConfigError(
                f"{key}.{field}",
                value,
                "no published numbers of it"
                + ("" if field == "dataset" else " and what is before"),
                nearest(str(value), held, show=40),
            )
    return found


def _of(numbers: Iterable[PublishedNumber], field: str) -> set[str]:
    return {str(getattr(n, field)) for n in numbers} - {""}
