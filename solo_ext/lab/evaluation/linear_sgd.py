"""Linear probes of frozen features by SGD: a grid of rates and penalties in one pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.lab.evaluation.linear import holdout_mask

_MOMENTUM = 0.9
_ROWS = 4096


@dataclass(frozen=True)
class SweepResult:
    """What :func:`sweep_linear_probes` measured, in percent.

    Attributes:
        accuracy: top-1 of the chosen probe on the test features.
        top5: its top-5 there; top-C with fewer than five training classes.
        train_accuracy: its top-1 on the train features.
        learning_rate: the rate chosen.
        weight_decay: the penalty chosen.
        held_out: top-1 on the held-out rows by (rate, penalty), of which the largest was chosen;
            empty where there was nothing to choose from or by.
    """

    accuracy: float
    top5: float
    train_accuracy: float
    learning_rate: float
    weight_decay: float
    held_out: dict[tuple[float, float], float]


@dataclass(frozen=True)
class _Data:
    """Rows and classes; rows are standardised by ``mean`` and ``std`` as they are read."""

    features: Tensor
    targets: Tensor
    mean: Tensor
    std: Tensor

    def rows(self, which: Tensor) -> tuple[Tensor, Tensor]:
        which = which.to(self.mean.device)
        return (self.features[which].float() - self.mean) / self.std, self.targets[which]


@torch.no_grad()
def sweep_linear_probes(
    train_features: Tensor,
    train_targets: Tensor,
    test_features: Tensor,
    test_targets: Tensor,
    *,
    learning_rates: Sequence[float],
    weight_decays: Sequence[float] = (0.0,),
    epochs: int = 30,
    batch_size: int = 256,
    holdout: float = 0.2,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> SweepResult:
    """Trains one linear classifier per rate and penalty at once, and keeps the best.

    Every classifier starts at zero and minimises ``mean CE(W x + b, y) + decay / 2 |W|^2`` by SGD
    with momentum 0.9 and a cosine schedule, on the same batches: the logits of all of them are one
    matrix product. The pair with the best top-1 on a stratified hold-out of the train rows is
    chosen, the smaller rate and the larger penalty on a tie, and trained again on all train rows.
    Where no class has two train rows there is no hold-out, and the middle of both lists is taken.
    The test rows are used for nothing but the accuracies that are returned. x is standardised by
    mean and deviation of the train rows, batch by batch: features on ``device`` are not copied.
    Rows with target -1 are dropped.

    Args:
        train_features: (n, D), finite.
        train_targets: (n,), from -1.
        test_features: (m, D), finite.
        test_targets: (m,), from -1.
        learning_rates: each above 0; not scaled by the batch.
        weight_decays: each 0 or more.
        epochs: passes over the rows.
        batch_size: rows of a step; the last batch of an epoch may be smaller.
        holdout: share of the train rows that chooses, of each class.
        seed: of the hold-out and the order.
        device: where the classifiers are.

    Raises:
        ValueError: shapes that do not match, or no labelled row on one side.

    Source:
        The protocol of many heads in one pass: Oquab et al., 2023, arXiv 2304.07193.
    """
    rows, test_rows = _labelled("train", train_targets), _labelled("test", test_targets)
    if train_features.shape[1:] != test_features.shape[1:] or train_features.ndim != 2:
        raise ValueError(
            f"train_features {tuple(train_features.shape)} and test_features "
            f"{tuple(test_features.shape)} must be (n, D) and (m, D)"
        )
    train_features, test_features = train_features.to(device), test_features.to(device)
    classes = torch.unique(train_targets[rows])
    # Penalties the largest first and rates the smallest first: the first of equals is kept.
    grid = list(itertools.product(sorted(learning_rates), sorted(weight_decays, reverse=True)))
    targets = torch.searchsorted(classes, train_targets.clamp_min(int(classes[0]))).to(device)
    held = holdout_mask(train_targets[rows].numpy(), holdout, seed)
    # Without a hold-out the middle, of two the smaller rate and the larger penalty.
    rates, decays = (list(dict.fromkeys(column)) for column in zip(*grid, strict=True))
    chosen, scores = (rates[(len(rates) - 1) // 2], decays[(len(decays) - 1) // 2]), {}
    if len(grid) > 1 and bool(held.any()):
        fit = _Data(train_features, targets, *_statistics(train_features, rows[~held]))
        heads = _trained(fit, rows[~held], len(classes), grid, epochs, batch_size, seed)
        accuracies = _accuracies(fit, rows[held], heads, (1,))[1]
        scores = dict(zip(grid, accuracies, strict=True))
        chosen = max(grid, key=scores.__getitem__)
    whole = _Data(train_features, targets, *_statistics(train_features, rows))
    head = _trained(whole, rows, len(classes), [chosen], epochs, batch_size, seed)
    known = torch.searchsorted(classes, test_targets).clamp_max(len(classes) - 1)
    known = torch.where(classes[known] == test_targets, known, -1)
    test = _Data(test_features, known.to(device), whole.mean, whole.std)
    found = _accuracies(test, test_rows, head, (1, 5))
    return SweepResult(
        accuracy=found[1][0],
        top5=found[5][0],
        train_accuracy=_accuracies(whole, rows, head, (1,))[1][0],
        learning_rate=chosen[0],
        weight_decay=chosen[1],
        held_out=scores,
    )


def _labelled(side: str, targets: Tensor) -> Tensor:
    rows = torch.nonzero(targets >= 0).flatten()
    if not len(rows):
        raise ValueError(f"{side}_targets have {len(targets)} rows, none of them labelled")
    return rows


def _statistics(features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    total = square = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    for part in torch.split(rows.to(features.device), _ROWS):
        x = features[part].double()
        total, square = total + x.sum(0), square + x.square().sum(0)
    mean = total / len(rows)
    std = (square / len(rows) - mean.square()).clamp_min(0).sqrt()
    # A dimension that never moves has nothing to say, and rounding must not be blown up.
    std = std.clamp_min(max(1e-4 * float(std.max()), 1e-30))
    return mean.float(), std.float()


def _trained(
    data: _Data,
    rows: Tensor,
    num_classes: int,
    grid: Sequence[tuple[float, float]],
    epochs: int,
    batch_size: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Weights (D, H, C) and biases (H, C) of the classifiers of a grid."""
    device, width, heads = data.mean.device, len(data.mean), len(grid)
    rates, decays = torch.tensor(grid, device=device, dtype=torch.float32).T[..., None]
    weight = torch.zeros(width, heads, num_classes, device=device)
    bias = torch.zeros(heads, num_classes, device=device)
    moved, moved_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    steps = epochs * -(-len(rows) // batch_size)
    done = 0
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rows[torch.from_numpy(rng.permutation(len(rows)))]
        for part in torch.split(order, batch_size):
            x, y = data.rows(part)
            logits = (x @ weight.flatten(1)).view(len(x), heads, num_classes) + bias
            slope = (logits.softmax(-1) - F.one_hot(y, num_classes)[:, None]) / len(x)
            gradient = (x.T @ slope.flatten(1)).view_as(weight).add_(weight * decays)
            moved.mul_(_MOMENTUM).add_(gradient)
            moved_bias.mul_(_MOMENTUM).add_(slope.sum(0))
            rate = rates * (0.5 * (1 + math.cos(math.pi * done / steps)))
            weight -= rate * moved
            bias -= rate * moved_bias
            done += 1
    return weight, bias


def _accuracies(
    data: _Data, rows: Tensor, heads: tuple[Tensor, Tensor], ranks: Sequence[int]
) -> dict[int, list[float]]:
    """Top-k accuracies of every classifier in percent."""
    weight, bias = heads
    hits = {k: torch.zeros(len(bias), device=bias.device) for k in ranks}
    for part in torch.split(rows, _ROWS):
        x, y = data.rows(part)
        logits = (x @ weight.flatten(1)).view(len(x), *bias.shape) + bias
        # A rate that is far too large ends in no number, which is no right answer.
        logits = logits.nan_to_num(float("-inf"), float("-inf"), float("-inf"))
        guess = logits.topk(min(max(ranks), bias.shape[1]), dim=-1).indices
        right = (guess == y[:, None, None]) & logits.isfinite().any(-1, keepdim=True)
        for k in ranks:
            hits[k] += right[..., :k].any(-1).sum(0)
    return {k: (100 * h / len(rows)).tolist() for k, h in hits.items()}
