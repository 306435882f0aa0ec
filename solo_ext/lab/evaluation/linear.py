"""Linear probes of frozen features: multinomial logistic regression by L-BFGS."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.lab.evaluation.labelled_draw import labelled_draw

_FEW_LABEL_WEIGHT_DECAY = 1e-2


@dataclass(frozen=True)
class LinearProbeResult:
    """What ``linear_probe`` measured.

    Attributes:
        accuracy: top-1 on the test features in percent, [0, 100].
        top5: top-5 on the test features in percent; top-C with C < 5 train classes.
        weight_decay: the penalty used.
        train_accuracy: top-1 on the train features in percent.
        num_train: number of labelled train rows.
    """

    accuracy: float
    top5: float
    weight_decay: float
    train_accuracy: float
    num_train: int


@dataclass(frozen=True)
class _Model:
    weight: Tensor
    bias: Tensor

    def accuracy(self, features: Tensor, targets: Tensor, topk: int = 1) -> float:
        logits = torch.addmm(self.bias, features, self.weight.T)
        guess = logits.topk(min(topk, logits.shape[1]), dim=1).indices
        return 100.0 * int((guess == targets[:, None]).sum()) / len(targets)


@torch.inference_mode(False)
def linear_probe(
    train_features: Tensor,
    train_targets: Tensor,
    test_features: Tensor,
    test_targets: Tensor,
    *,
    weight_decays: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    holdout: float = 0.2,
    max_iterations: int = 200,
    seed: int = 0,
    num_classes: int | None = None,
) -> LinearProbeResult:
    """Accuracy of a multinomial logistic regression fitted to frozen features.

    Minimises ``mean_i CE(W x_i + b, y_i) + weight_decay / 2 * ||W||^2`` over the n train rows
    (scikit-learn's ``C = 1 / (n * weight_decay)``), x standardised by the mean and standard
    deviation of the train features, in float64 by L-BFGS with strong Wolfe line search, on the
    device of ``train_features``. The penalty is the one with the best top-1 on a stratified
    hold-out of the train rows, the stronger one on a tie; the grid is walked from the strongest
    penalty to the weakest, each fit starting at the previous one, and the chosen one is refitted
    on all train rows. The test rows are used for nothing but the reported accuracies. Rows with
    target -1 (unlabelled) are dropped. Repeated calls return the same numbers.

    If a train class has fewer than 2 rows there is no stratified hold-out, and the middle of the
    sorted grid is used (the stronger of two middles); a single penalty is used as it is. Classes
    without train rows are never predicted: their test rows count as errors.

    Args:
        train_features: (n, D), finite.
        train_targets: (n,) classes, from -1.
        test_features: (m, D), finite.
        test_targets: (m,) classes, from -1.
        weight_decays: penalties to choose from, each at least 0.
        holdout: share of every class's train rows held out, in (0, 1); at least one row of each
            class is held out and at least one is fitted.
        max_iterations: cap of the L-BFGS iterations of every fit, at least 1.
        seed: of the hold-out, at least 0.
        num_classes: targets must lie below it; ``None`` for no bound.

    Returns:
        The accuracies in percent, with the penalty chosen.

    Raises:
        ValueError: no labelled row on one side, shapes that do not match, a target or an option
            outside its range, or features that are not finite.

    Source:
        Protocol of Kornblith et al., CVPR 2019, arXiv 1805.08974.
    """
    _check_options(weight_decays, holdout, max_iterations, seed)
    device = train_features.device
    x, train_labels = _labelled("train", train_features, train_targets, device, num_classes)
    x_test, test_labels = _labelled("test", test_features, test_targets, device, num_classes)
    if x.shape[1] != x_test.shape[1]:
        raise ValueError(
            f"train_features have {x.shape[1]} columns, test_features {x_test.shape[1]}; pass "
            "features of the same backbone."
        )
    # Absent classes would drive their unpenalised biases to minus infinity.
    classes, y = torch.unique(train_labels, return_inverse=True)
    y_test = torch.searchsorted(classes, test_labels).clamp_max(len(classes) - 1)
    y_test = torch.where(classes[y_test] == test_labels, y_test, -1)

    std, mean = torch.std_mean(x, dim=0, correction=0)
    std = std.clamp_min(max(1e-6 * float(std.max()), 1e-30))
    x, x_test = (x - mean) / std, (x_test - mean) / std

    blank = _Model(x.new_zeros(len(classes), x.shape[1]), x.new_zeros(len(classes)))
    weight_decay, start = _choose(x, y, blank, sorted(weight_decays), holdout, max_iterations, seed)
    model = _fit(x, y, start, weight_decay, max_iterations)
    return LinearProbeResult(
        accuracy=model.accuracy(x_test, y_test),
        top5=model.accuracy(x_test, y_test, topk=5),
        weight_decay=weight_decay,
        train_accuracy=model.accuracy(x, y),
        num_train=len(x),
    )


def few_label_probe(
    train_features: Tensor,
    train_targets: Tensor,
    test_features: Tensor,
    test_targets: Tensor,
    *,
    per_class: int = 10,
    draws: int = 5,
    seed: int = 0,
) -> tuple[float, float, list[float]]:
    """Accuracy of linear probes fitted to few labels per class, over random class-balanced draws.

    Every draw takes ``per_class`` train rows of each class and evaluates ``linear_probe`` on all
    test rows with the fixed penalty 0.01: a hold-out of so few rows would choose by chance. Draw d
    depends on the train targets, ``per_class`` and ``(seed, d)`` alone, so methods whose features
    come in the same row order are compared on the same subsets.

    Args:
        train_features: (n, D), finite.
        train_targets: (n,) classes, from -1; rows with -1 (unlabelled) are never drawn.
        test_features: (m, D), finite.
        test_targets: (m,) classes, from -1; rows with -1 are dropped.
        per_class: rows drawn of every class, at least 1.
        draws: number of subsets, at least 1.
        seed: at least 0.

    Returns:
        Mean, sample standard deviation (``ddof=1``; nan for a single draw) and list of the top-1
        accuracies in percent.

    Raises:
        ValueError: a class of either side has fewer than ``per_class`` train rows, ``per_class``,
            ``draws`` or ``seed`` is too small, or any error of ``linear_probe``.

    Source:
        The protocol of repeated balanced draws: Sohn et al., NeurIPS 2020, arXiv 2001.07685.
    """
    for name, value, least in (("per_class", per_class, 1), ("draws", draws, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}.")
    labels, test_labels = train_targets.cpu().numpy(), test_targets.cpu().numpy()
    classes = np.union1d(labels, test_labels)
    accuracies = []
    for draw in range(draws):
        rows = labelled_draw(labels, classes[classes >= 0], per_class, seed, draw)
        result = linear_probe(
            train_features[rows.to(train_features.device)],
            train_targets[rows.to(train_targets.device)],
            test_features,
            test_targets,
            weight_decays=(_FEW_LABEL_WEIGHT_DECAY,),
        )
        accuracies.append(result.accuracy)
    spread = statistics.stdev(accuracies) if draws > 1 else float("nan")
    return statistics.fmean(accuracies), spread, accuracies


def _choose(
    x: Tensor,
    y: Tensor,
    blank: _Model,
    grid: list[float],
    holdout: float,
    max_iterations: int,
    seed: int,
) -> tuple[float, _Model]:
    """Returns the penalty to use and a starting point for its fit on all rows."""
    if len(grid) == 1 or int(y.bincount().min()) < 2:
        return grid[len(grid) // 2], blank
    held = holdout_mask(y.cpu().numpy(), holdout, seed).to(x.device)
    x_fit, y_fit, x_held, y_held = x[~held], y[~held], x[held], y[held]
    model, best = blank, (-1.0, grid[-1], blank)
    for weight_decay in reversed(grid):
        model = _fit(x_fit, y_fit, model, weight_decay, max_iterations)
        accuracy = model.accuracy(x_held, y_held)
        if accuracy > best[0]:
            best = (accuracy, weight_decay, model)
    return best[1:]


def holdout_mask(labels: np.ndarray, holdout: float, seed: int) -> Tensor:
    """Which rows are held out: ``holdout`` of every class, at least one, never all of them.

    Args:
        labels: (n,) classes.
        holdout: above 0, below 1.
        seed: of the draw.

    Returns:
        (n,) bool.
    """
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        held[rows[: min(max(1, round(holdout * len(rows))), len(rows) - 1)]] = True
    return torch.from_numpy(held)


def _fit(x: Tensor, y: Tensor, start: _Model, weight_decay: float, max_iterations: int) -> _Model:
    weight = start.weight.clone().requires_grad_()
    bias = start.bias.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iterations,
        max_eval=4 * max_iterations,
        history_size=20,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        data = F.cross_entropy(torch.addmm(bias, x, weight.T), y)
        loss = data + 0.5 * weight_decay * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(objective)  # type: ignore[no-untyped-call]
    return _Model(weight.detach(), bias.detach())


def _labelled(
    side: str, features: Tensor, targets: Tensor, device: torch.device, num_classes: int | None
) -> tuple[Tensor, Tensor]:
    if features.ndim != 2 or targets.shape != features.shape[:1]:
        raise ValueError(
            f"{side}_features and {side}_targets have the shapes {tuple(features.shape)} and "
            f"{tuple(targets.shape)}; pass (n, D) and (n,)."
        )
    labels = targets.to(device).long()
    labelled = labels >= 0
    if not labelled.any():
        raise ValueError(
            f"{side}_targets have {len(labels)} rows, none of them labelled; pass at least one row "
            "with a target of 0 or more."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < -1 or (num_classes is not None and high >= num_classes):
        bound = "" if num_classes is None else f" to {num_classes - 1}"
        raise ValueError(
            f"{side}_targets lie in [{low}, {high}]; allowed are classes from 0{bound}, and -1 for "
            "an unlabelled row."
        )
    rows = features.to(device, torch.float64)[labelled]
    broken = int((~rows.isfinite().all(dim=1)).sum())
    if broken:
        raise ValueError(
            f"{broken} of {len(rows)} rows of {side}_features are not finite; check the backbone "
            "that made them."
        )
    return rows, labels[labelled]


def _check_options(
    weight_decays: Sequence[float], holdout: float, max_iterations: int, seed: int
) -> None:
    if not len(weight_decays) or not all(value >= 0 for value in weight_decays):
        raise ValueError(
            f"weight_decays is {list(weight_decays)}; pass at least one number, none below 0."
        )
    if not 0 < holdout < 1:
        raise ValueError(f"holdout is {holdout}; it must lie between 0 and 1, both excluded.")
    if max_iterations < 1 or seed < 0:
        raise ValueError(
            f"max_iterations is {max_iterations} and seed {seed}; they must be at least 1 and 0."
        )
