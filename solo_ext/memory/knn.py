"""Weighted k-nearest-neighbour classification of frozen features (Wu et al., arXiv 1805.01978)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import rank_zero_warn

Setting = tuple[int, float]
"""A pair (k, temperature)."""

_MAX_ELEMENTS = 2**24
_SMALLEST_NORM = 1e-12
_DISTANCES = ("cosine", "euclidean")


def cosines(queries: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """Cosine similarities (B, m) in fp32, also under autocast; a row of zeros has cosine 0.

    Args:
        queries: (B, D), of any norm and floating dtype.
        rows: (m, D), likewise; they may fill the memory, so half precision is cast part by part.
        scale: (m,) reciprocal lengths of ``rows``, from :func:`inverse_norms`.

    Example:
        >>> rows = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
        >>> cosines(torch.tensor([[3.0, 4.0]]), rows, inverse_norms(rows))
        tensor([[0.6000, 0.8000]])
    """
    similarity = queries.new_empty(len(queries), len(rows), dtype=torch.float32)
    queries = F.normalize(queries.float(), dim=-1)
    # In half precision a cosine is off by about 1e-3, and a vote at T = 0.01 by 10 %.
    with torch.autocast(queries.device.type, enabled=False):
        for start, part in _parts(rows):
            torch.mm(queries, part.T, out=similarity[:, start : start + len(part)])
    return similarity.mul_(scale)


def inverse_norms(rows: Tensor) -> Tensor:
    """(m,) reciprocal lengths of rows (m, D), in fp32.

    Example:
        >>> inverse_norms(torch.tensor([[3.0, 4.0]]))
        tensor([0.2000])
    """
    norms = [torch.linalg.vector_norm(part, dim=-1) for _, part in _parts(rows)]
    joined = torch.cat(norms) if norms else rows.new_empty(0, dtype=torch.float32)
    return joined.clamp_min(_SMALLEST_NORM).reciprocal()


@torch.no_grad()
def nearest_neighbors(
    queries: Tensor, bank: Tensor, k: int, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of a bank with the largest cosines to each query, the nearest first.

    Args:
        queries: (n, D).
        bank: (m, D).
        k: how many; at most m, or with ``own`` m - 1.
        own: (n,) the rows that the queries are themselves, which are no neighbours of theirs.

    Returns:
        Indices, and cosines in [-1, 1], both (n, k), on the CPU.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> nearest_neighbors(rows, rows, 1, own=torch.arange(3))[0].flatten().tolist()
        [1, 0, 1]
    """
    scale, size, found = inverse_norms(bank), max(1, _MAX_ELEMENTS // len(bank)), []
    for start in range(0, len(queries), size):
        similarity = cosines(queries[start : start + size], bank, scale)
        if own is not None:
            places = own[start : start + size, None].to(bank.device)
            similarity.scatter_(1, places, float("-inf"))
        found.append(similarity.topk(k, dim=1))
    return torch.cat([f.indices for f in found]).cpu(), torch.cat([f.values for f in found]).cpu()


def _parts(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the rows in fp32, in parts if the conversion needs a copy."""
    size = len(rows) if rows.dtype == torch.float32 else _MAX_ELEMENTS // rows.shape[-1]
    for start in range(0, len(rows), max(1, size)):
        yield start, rows[start : start + max(1, size)].float()


@torch.no_grad()
def class_scores(
    features: Tensor,
    bank: Tensor,
    bank_targets: Tensor,
    *,
    ks: Sequence[int],
    temperatures: Sequence[float],
    num_classes: int,
    epsilon: float | None = None,
    max_elements: int | None = None,
) -> Iterator[dict[Setting, Tensor]]:
    """Scores every class for every query by the weighted votes of its nearest bank rows.

    ``score[c] = sum_{i in k nearest, y_i = c} exp((s_i - s_max) / T)`` with the cosine similarity
    ``s_i`` and its maximum ``s_max`` over the bank. Subtracting ``s_max`` scales all scores of a
    query alike, so the ranking is that of ``exp(s_i / T)``, but nothing overflows. With ``epsilon``
    the votes are ``1 / (d_i + epsilon)`` of the Euclidean distance, and T has no effect.

    Args:
        features: queries (n_query, D), of any norm and floating dtype.
        bank: labelled rows (n_bank, D), at least one.
        bank_targets: their classes (n_bank,), in [0, num_classes).
        ks: numbers of neighbours, each >= 1; a k above ``n_bank`` is clipped to it.
        temperatures: T, each > 0.
        num_classes: C.
        epsilon: added to the Euclidean distance; by default cosines are compared.
        max_elements: largest size of a block of similarities; by default 2**24.

    Yields:
        For consecutive blocks of queries, per (k, temperature) the scores (B, C) in fp32. A class
        has score 0 exactly when none of the k neighbours votes for it.

    Raises:
        ValueError: a k or temperature that is not positive.

    Example:
        >>> bank, classes = torch.eye(3), torch.tensor([0, 1, 1])
        >>> (scores,) = class_scores(
        ...     bank[:1], bank, classes, ks=[1], temperatures=[0.1], num_classes=2
        ... )
        >>> scores[1, 0.1]
        tensor([[1., 0.]])
    """
    if min(*ks, *temperatures) <= 0:
        raise ValueError(f"ks={list(ks)}, temperatures={list(temperatures)}: must be above 0")
    bank, labels = bank.to(features.device), bank_targets.to(features.device).long()
    inverse = inverse_norms(bank)
    sizes = {k: min(k, len(bank)) for k in ks}
    for block in torch.split(features, max(1, (max_elements or _MAX_ELEMENTS) // len(bank))):
        if epsilon is not None:
            similar = 1.0 / (torch.cdist(block, bank) + epsilon)
        else:
            similar = cosines(block, bank, inverse)
        values, nearest = similar.topk(max(sizes.values()), dim=1)
        votes, scores = labels[nearest], {}
        for temperature in temperatures:
            weight = values
            if epsilon is None:
                weight = ((values - values[:, :1]) / temperature).exp()
                # A vote that underflows to 0 could not be told from no vote.
                weight = weight.clamp_min(torch.finfo(weight.dtype).tiny)
            for k, size in sizes.items():
                empty = weight.new_zeros(len(block), num_classes)
                scores[k, temperature] = empty.scatter_add_(1, votes[:, :size], weight[:, :size])
        yield scores


def knn_accuracy(
    features: Tensor,
    targets: Tensor,
    bank: Tensor,
    bank_targets: Tensor,
    *,
    ks: Sequence[int] = (20,),
    temperatures: Sequence[float] = (0.07,),
    topk: Sequence[int] = (1, 5),
    **options: Any,
) -> dict[Setting, dict[int, float]]:
    """Top-k accuracies of the weighted kNN classifier of :func:`class_scores`.

    A prediction counts only if at least one neighbour voted for the class: with fewer voted
    classes than ``topk``, the remaining places would otherwise be filled by class index. Rows
    with target -1 (unlabelled) are dropped on both sides. All settings share one pass over the
    similarities.

    Args:
        features: queries (n_query, D).
        targets: their classes (n_query,), -1 for unlabelled.
        bank: rows (n_bank, D).
        bank_targets: their classes (n_bank,), -1 for unlabelled.
        ks: numbers of neighbours, as :func:`class_scores` takes them.
        temperatures: likewise.
        topk: ranks to report, each >= 1; clipped to the number of classes.
        **options: ``epsilon`` and ``max_elements`` of :func:`class_scores`.

    Returns:
        For each (k, temperature) and each of ``topk``, the accuracy in percent, [0, 100].

    Raises:
        ValueError: no labelled query or no labelled bank row is left; errors of
            :func:`class_scores`.

    Example:
        >>> rows, classes = torch.eye(4), torch.arange(4)
        >>> knn_accuracy(rows, classes, rows, classes, ks=[1])
        {(1, 0.07): {1: 100.0, 5: 100.0}}
    """
    features, targets = _labelled("features", features, targets)
    bank, bank_targets = _labelled("bank", bank, bank_targets)
    options |= {"ks": ks, "temperatures": temperatures}
    options["num_classes"] = 1 + max(int(targets.max()), int(bank_targets.max()))
    hits: dict[Setting, Tensor] = {}
    start = 0
    for block in class_scores(features, bank, bank_targets, **options):
        for setting, scores in block.items():
            truth = targets[start : start + len(scores)].to(scores.device)
            best, guess = scores.topk(min(max(topk), scores.shape[1]), dim=1)
            hit = ((guess == truth[:, None]) & (best > 0)).sum(dim=0)
            hits[setting] = hits[setting] + hit if setting in hits else hit
        start += len(scores)
    return {
        setting: {rank: 100.0 * int(hit[:rank].sum()) / len(targets) for rank in topk}
        for setting, hit in hits.items()
    }


class OnlineKNN(Metric):
    """Accumulates features during an epoch and classifies test features by weighted kNN.

    Drop-in for solo-learn's ``WeightedKNNClassifier``, whose constructor torchmetrics 1.x rejects.
    Votes are those of :func:`class_scores`, by cosine or by Euclidean distance of the raw features.
    Rows with target -1 are ignored. Unlike solo-learn's, this class normalises the features for the
    cosine, and train and test rows may have different classes.

    Args:
        k: number of neighbours, >= 1; clipped to the number of train rows.
        T: temperature of the cosine votes, > 0; ``None`` for Euclidean votes, which have none.
        max_distance_matrix_size: largest number of elements of a similarity block.
        distance_fx: "cosine" or "euclidean".
        epsilon: added to the distance; ignored by the cosine.
        dist_sync_on_step: accepted for compatibility; ``forward`` never synchronises.

    Raises:
        ValueError: an unknown ``distance_fx``.

    Example:
        >>> knn = OnlineKNN(k=1)
        >>> knn(train_features=torch.eye(3), train_targets=torch.arange(3))
        >>> knn(test_features=torch.eye(3), test_targets=torch.tensor([0, 1, 0]))
        >>> [round(accuracy, 1) for accuracy in knn.compute()]
        [66.7, 66.7]
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    train_features: list[Tensor] | Tensor
    train_targets: list[Tensor] | Tensor
    test_features: list[Tensor] | Tensor
    test_targets: list[Tensor] | Tensor

    def __init__(
        self,
        k: int = 20,
        T: float | None = 0.07,
        max_distance_matrix_size: int = _MAX_ELEMENTS,
        distance_fx: str = "cosine",
        epsilon: float = 1e-5,
        dist_sync_on_step: bool = False,
    ) -> None:
        # compute() discards all rows: a cached result would outlive the features it came from.
        super().__init__(dist_sync_on_step=dist_sync_on_step, compute_with_cache=False)
        if distance_fx not in _DISTANCES:
            raise ValueError(f"distance_fx={distance_fx!r}: must be one of {_DISTANCES}")
        self.k, self.T = k, 1.0 if T is None else T
        self.max_distance_matrix_size = max_distance_matrix_size
        self.distance_fx, self.epsilon = distance_fx, epsilon
        for name in ("train_features", "train_targets", "test_features", "test_targets"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Stores the rows like ``update``; torchmetrics' version would compute on every batch."""
        self.update(*args, **kwargs)

    def update(
        self,
        train_features: Tensor | None = None,
        train_targets: Tensor | None = None,
        test_features: Tensor | None = None,
        test_targets: Tensor | None = None,
    ) -> None:
        """Stores a batch of train rows (n, D) and classes (n,), of test rows, or of both.

        Raises:
            ValueError: features without targets or the reverse, or their numbers differ.
        """
        given = {"train": (train_features, train_targets), "test": (test_features, test_targets)}
        for side, (features, targets) in given.items():
            if features is None and targets is None:
                continue
            if features is None or targets is None or len(features) != len(targets):
                found = [None if rows is None else len(rows) for rows in (features, targets)]
                raise ValueError(
                    f"{side}_features and {side}_targets have {found[0]} and {found[1]} rows; "
                    "pass both with as many rows, or neither"
                )
            getattr(self, f"{side}_features").append(features.detach())
            getattr(self, f"{side}_targets").append(targets.detach())

    def compute(self) -> tuple[float, float]:
        """Top-1 and top-5 accuracy in percent of the stored rows, which are then discarded.

        Returns (nan, nan), with a warning, without labelled train rows or labelled test rows.
        """
        bank, bank_targets = _joined(self.train_features, self.train_targets)
        features, targets = _joined(self.test_features, self.test_targets)
        self.reset()
        if not len(bank) or not len(features):
            rank_zero_warn(
                f"OnlineKNN has {len(bank)} labelled train and {len(features)} labelled test rows; "
                "it needs both, so its accuracy is nan. Call update() with both before compute()."
            )
            return float("nan"), float("nan")
        accuracy = knn_accuracy(
            features,
            targets,
            bank,
            bank_targets,
            ks=[self.k],
            temperatures=[self.T],
            epsilon=self.epsilon if self.distance_fx == "euclidean" else None,
            max_elements=self.max_distance_matrix_size,
        )[self.k, self.T]
        return accuracy[1], accuracy[5]

    def reset(self) -> None:
        """Discards all rows."""
        # After synchronisation a state is a tensor, and the base class can only clear a list.
        for name in self._defaults:
            setattr(self, name, [])
        super().reset()


def _joined(
    features: list[Tensor] | Tensor, targets: list[Tensor] | Tensor
) -> tuple[Tensor, Tensor]:
    """Joins one side's state, a list or (once synchronised) a tensor, without unlabelled rows."""
    if isinstance(features, list):
        features = torch.cat(features) if features else torch.empty(0, 0)
    if isinstance(targets, list):
        targets = torch.cat(targets) if targets else torch.empty(0)
    labelled = targets >= 0
    return features[labelled].float(), targets[labelled].long()


def _labelled(name: str, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    labelled = targets >= 0
    if not labelled.any():
        raise ValueError(f"{name} has {len(targets)} rows, none of them labelled; pass some")
    if labelled.all():
        return features, targets
    return features[labelled.to(features.device)], targets[labelled]
