"""Which images a picture shows, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from solo_ext.data.reading import Images


def seeded_sample(targets: Tensor, count: int, max_classes: int, seed: int) -> Tensor:
    """At most ``count`` labelled rows of at most ``max_classes`` classes, drawn from the seed.

    Args:
        targets: (n,), -1 where there is no label.
        count: above 0.
        max_classes: above 0.
        seed: of the draw.

    Returns:
        Indices in rising order.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = torch.unique(targets[targets >= 0])
    if len(classes) > max_classes:
        classes = classes[torch.randperm(len(classes), generator=generator)[:max_classes]]
    rows = torch.nonzero(torch.isin(targets, classes)).flatten()
    return rows[torch.randperm(len(rows), generator=generator)[:count]].sort().values


def queries_of_all_classes(targets: Tensor, count: int, seed: int) -> Tensor:
    """Rows drawn class by class in turn, so that as many classes as possible are seen.

    Args:
        targets: (n,), -1 where there is no label.
        count: how many rows, fewer where there are not as many.
        seed: of the draw; it says too which classes are seen where there are more.

    Returns:
        Indices, ordered by class.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator)
    order = order[targets[order] >= 0]
    labels = targets[order]
    turn = torch.zeros(len(order), dtype=torch.int64)
    classes = torch.unique(labels)
    first = torch.randperm(len(classes), generator=generator)
    for place, label in zip(first.tolist(), classes.tolist(), strict=True):
        own = labels == label
        turn[own] = torch.arange(int(own.sum())) * len(classes) + place
    chosen = order[turn.argsort()[:count]]
    return chosen[targets[chosen].argsort(stable=True)]


def image_names(images: Images, indices: Sequence[int]) -> list[str]:
    """Names of images: ``<class>/<file>`` where they are files, else their numbers."""
    places = list(indices)
    source: Any = images
    while isinstance(source, Subset):
        places = [int(source.indices[i]) for i in places]
        source = source.dataset
    found: Any = getattr(source, "samples", None)
    if not found:
        return [f"image {i}" for i in places]
    return ["/".join(Path(str(found[i][0])).parts[-2:]) for i in places]
