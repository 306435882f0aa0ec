"""Images with their embeddings, labels and clusters, in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True)
class Clusters:
    """Clusters of one granularity: one entry for each image in all three arrays.

    Attributes:
        assignments: (n,) the number of the image's cluster.
        distances: (n,) distance of the image to its prototype.
        concentration: (n,) concentration of the image's cluster, small for a tight one (Li et al.,
            ICLR 2021, arXiv 2005.04966, Eq. 12).

    >>> Clusters(np.array([0, 1, 1]), np.zeros(3), np.array([0.2, 0.1, 0.1])).sizes
    {0: 1, 1: 2}
    """

    assignments: NDArray[Any]
    distances: NDArray[Any]
    concentration: NDArray[Any]

    @cached_property
    def concentrations(self) -> dict[int, float]:
        """The concentration of each cluster that has an image."""
        found, first = np.unique(self.assignments, return_index=True)
        return dict(zip(found.tolist(), self.concentration[first].tolist(), strict=True))

    @cached_property
    def sizes(self) -> dict[int, int]:
        """How many images each cluster has, of those that have any."""
        found, counts = np.unique(self.assignments, return_counts=True)
        return dict(zip(found.tolist(), counts.tolist(), strict=True))

    def members(self, cluster: int) -> NDArray[np.int64]:
        """The images of a cluster, the nearest to its prototype first."""
        rows = np.flatnonzero(self.assignments == cluster)
        return rows[np.argsort(self.distances[rows], kind="stable")]


@dataclass(frozen=True)
class Sample:
    """Images with their embeddings; one entry for each image in all of its fields.

    Attributes:
        paths: where the images are, or what they are called.
        embeddings: (n, D), of any length.
        open_image: returns the picture of a row.
        labels: names of the classes; ``None`` where an image has none.
        clusters: those of PCL by granularity.

    >>> red = Image.new("RGB", (8, 8), "red")
    >>> Sample(["b/cat/1.png", "b/dog/2.png"], np.eye(2), lambda row: red).names
    ['cat/1.png', 'dog/2.png']
    """

    paths: Sequence[str]
    embeddings: NDArray[Any]
    open_image: Callable[[int], Image.Image]
    labels: Sequence[str | None] = ()
    clusters: Mapping[int, Clusters] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: NDArray[Any]) -> Sample:
        """The images of these rows alone."""
        return Sample(
            [self.paths[row] for row in rows],
            self.embeddings[rows],
            lambda place: self.open_image(int(rows[place])),
            [self.labels[row] for row in rows] if self.labels else (),
            {
                k: Clusters(c.assignments[rows], c.distances[rows], c.concentration[rows])
                for k, c in self.clusters.items()
            },
        )

    @cached_property
    def names(self) -> list[str]:
        """The paths without the folder that all have in common, and as text that can be shown."""
        folders = {os.path.dirname(path) for path in self.paths}
        try:
            common = os.path.commonpath(folders)
        except ValueError:
            # Some of them are absolute, or there are none.
            common = ""
        start = len(os.path.join(common, "")) if common else 0
        return [shown(path[start:]) for path in self.paths]


def shown(name: str) -> str:
    r"""The name with escapes for what cannot be printed, as control characters and lost bytes.

    Marks that turn the direction of text around are among these: a name with them would show
    another ending than the file has.

    >>> print(shown("a\nb\u202egnp.exe"), shown("größe 大.png"))
    a\nb\u202egnp.exe größe 大.png
    """
    if name.isprintable():
        return name
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in name
    )
