"""What a contrastive method logs at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solo_ext.losses.contrastive import ContrastiveTerms
from solo_ext.memory.features import FeatureQueue, Neighbours, SupportSet


def term_metrics(
    terms: Sequence[ContrastiveTerms], *, debiased: bool, mixing: bool
) -> dict[str, Tensor]:
    """Means over the directions of the terms that say something.

    Args:
        terms: of each direction.
        debiased: whether the estimate has a floor.
        mixing: whether negatives are mixed.
    """
    names = {"train_hardness": "hardness"}
    if debiased:
        names["train_clamped_fraction"] = "floored"
    if mixing:
        names |= {"train_mined_similarity": "mined", "train_mixed_similarity": "mixed"}
    return {
        metric: torch.stack([getattr(t, name) for t in terms]).mean()
        for metric, name in names.items()
    }


def neighbour_metrics(
    found: Neighbours, support_set: SupportSet, indices: Tensor | None, targets: Tensor | None
) -> dict[str, Tensor]:
    """Whether neighbours are of the image's class, how near, and how often the image itself.

    Args:
        found: neighbours of each large crop, one crop after the other.
        support_set: where they were found, as it was then.
        indices: (N,) sample indices; ``None`` for data without.
        targets: (N,) labels, -1 where there is none; ``None`` for data without labels.
    """
    # With too few rows that are allowed the rest have a similarity of minus infinity.
    there = found.similarity.isfinite()
    similarity = torch.where(there, found.similarity, 0.0).sum() / there.sum().clamp(min=1)
    metrics = {"train_nn_similarity": similarity}
    rows = len(found.index)
    if indices is not None:
        image = indices.repeat(rows // len(indices)).unsqueeze(1)
        metrics["train_nn_own"] = (support_set.indices[found.index] == image).float().mean()
    if targets is not None:
        label = targets.repeat(rows // len(targets)).unsqueeze(1)
        known = (found.labels >= 0) & (label >= 0)
        same = known & (found.labels == label)
        metrics["train_nn_acc"] = same.sum() / known.sum().clamp(min=1)
    return metrics | queue_metrics("support", support_set)


def queue_metrics(name: str, queue: FeatureQueue) -> dict[str, Tensor]:
    """What a queue holds; numbers of Python, made on its device without waiting for it.

    Args:
        name: in the metrics' names.
        queue: any.
    """
    device = queue.value.device
    return {
        f"train_{name}_filled": torch.full((), queue.filled, device=device),
        f"train_{name}_age": torch.full((), float(queue.age), device=device),
    }
