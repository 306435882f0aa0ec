"""Linear probes of frozen features by L-BFGS, on all or on few labels."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt, MinLen
from scipy.stats import t as student_t
from torch import Tensor

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from solo_ext.lab.evaluation.features import Features, Rows, refuse_non_finite
from solo_ext.lab.evaluation.protocol import FeatureProtocol, Row, accuracies

logger = logging.getLogger(__name__)
Holdout = Annotated[float, Gt(0), Lt(1)]
Head = tuple[Tensor, Tensor]
"""Weight (C, D) and bias (C,)."""


class Linear(FeatureProtocol):
    """Settings of ``eval linear``: penalties to choose from, and the share of rows held out.

    >>> rows = torch.eye(2).repeat(5, 1), torch.arange(2).repeat(5)
    >>> Linear(weight_decay=[0.1]).measure(Features(rows, rows, ["cat", "dog"]))
    [{'acc1': 100.0, 'acc5': 100.0, 'train_acc1': 100.0, 'weight_decay': 0.1}]
    """

    title: ClassVar[str] = "Linear probe, L-BFGS"

    weight_decay: Annotated[list[NonNegativeFloat], MinLen(1)] = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    holdout: Holdout = 0.2
    max_iterations: PositiveInt = 200
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row: the numbers of :meth:`probe`."""
        return [self.probe(features.train, features.test)]

    @torch.inference_mode(False)
    def probe(self, train: Rows, test: Rows) -> dict[str, float]:
        """Accuracy of a multinomial logistic regression fitted to frozen features.

        Minimises ``mean_i CE(W x_i + b, y_i) + weight_decay / 2 * ||W||^2`` over the n train rows
        (scikit-learn's ``C = 1 / (n * weight_decay)``), x standardised by the mean and deviation of
        the train rows, in float64 by L-BFGS with strong Wolfe line search. The penalty is the one
        with the best top-1 on a stratified hold-out of the train rows, the stronger one on a tie;
        with it, the classifier is fitted again on all train rows. The test rows influence no
        choice.

        If a train class has only one row, there is no hold-out, and the middle of the sorted
        penalties is used (the stronger of two). Classes without train rows are never predicted.

        Args:
            train: features (n, D) and their classes (n,).
            test: features (m, D) and their classes (m,).

        Returns:
            ``acc1``, ``acc5`` and ``train_acc1`` in percent, and the chosen ``weight_decay``.

        Raises:
            ValueError: features that are not finite.

        Source:
            Protocol of Kornblith et al., CVPR 2019, arXiv 1805.08974.

        >>> y = torch.arange(3).repeat(10)
        >>> x = torch.eye(3)[y]
        >>> Linear().probe((x, y), (x, y))["acc1"]
        100.0
        """
        for features, _ in (train, test):
            refuse_non_finite(features)
        x, x_test = train[0].double(), test[0].double()
        # Leave out classes without train rows: their biases would go to minus infinity.
        classes, y = torch.unique(train[1], return_inverse=True)
        y_test = _numbered(test[1], classes)

        std, mean = torch.std_mean(x, dim=0, correction=0)
        std = std.clamp_min(max(1e-6 * float(std.max()), 1e-30))
        x, x_test = (x - mean) / std, (x_test - mean) / std

        grid, best = sorted(self.weight_decay), -1.0
        chosen = grid[len(grid) // 2]
        head = start = x.new_zeros(len(classes), x.shape[1]), x.new_zeros(len(classes))
        if len(grid) > 1 and int(y.bincount().min()) > 1:
            held = holdout_mask(y.cpu().numpy(), self.holdout, self.seed).to(x.device)
            for penalty in reversed(grid):
                head = _fit(x[~held], y[~held], head, penalty, self.max_iterations)
                accuracy = _accuracies(head, x[held], y[held])["acc1"]
                if accuracy > best:
                    best, chosen, start = accuracy, penalty, head
        head = _fit(x, y, start, chosen, self.max_iterations)
        train_acc1 = _accuracies(head, x, y)["acc1"]
        found = _accuracies(head, x_test, y_test)
        return {**found, "train_acc1": train_acc1, "weight_decay": chosen}


def _numbered(targets: Tensor, classes: Tensor) -> Tensor:
    """Positions of targets among sorted classes, -1 for targets that are not among them."""
    found = torch.searchsorted(classes, targets).clamp_max(len(classes) - 1)
    return torch.where(classes[found] == targets, found, -1)


def _accuracies(head: Head, x: Tensor, y: Tensor) -> dict[str, float]:
    return accuracies(torch.addmm(head[1], x, head[0].T), y)


def _fit(x: Tensor, y: Tensor, start: Head, weight_decay: float, max_iterations: int) -> Head:
    weight, bias = (tensor.clone().requires_grad_() for tensor in start)
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
    return weight.detach(), bias.detach()


def holdout_mask(labels: npt.NDArray[np.int64], holdout: float, seed: int) -> Tensor:
    """Mask (n,) of the rows to hold out: a share of every class, at least one row but never all.

    >>> held = holdout_mask(np.array([0] * 10 + [1] * 5), 0.2, seed=0)
    >>> held[:10].sum().item(), held[10:].sum().item()
    (2, 1)
    """
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        held[rows[: min(max(1, round(holdout * len(rows))), len(rows) - 1)]] = True
    return torch.from_numpy(held)


def _draw_labelled_rows(
    labels: npt.NDArray[np.int64], classes: Sequence[int], amount: int | float, seed: int, draw: int
) -> Tensor:
    """Indices of randomly drawn rows: ``amount`` of each class, or this share of it if a float.

    A draw depends only on the labels and on (seed, draw), so models whose features are in the same
    order are compared on the same rows. Within a draw, larger amounts contain the smaller ones.
    """
    rng = np.random.default_rng((seed, draw))
    chosen = []
    for label in classes:
        own = np.flatnonzero(labels == label)
        wanted = amount if isinstance(amount, int) else max(1, round(amount * len(own)))
        chosen.append(rng.permutation(own)[:wanted])
    return torch.from_numpy(np.concatenate(chosen))


class LowShot(FeatureProtocol):
    """Settings of ``eval lowshot``: linear probes on few labels, over repeated draws.

    Of several penalties, a hold-out of each draw chooses one; a single penalty is used as it is.

    Source:
        The protocol of repeated balanced draws: Sohn et al., NeurIPS 2020, arXiv 2001.07685.

    >>> rows = torch.eye(2).repeat(5, 1), torch.arange(2).repeat(5)
    >>> few = LowShot(shots=[1], fractions=[], weight_decay=[0.1])
    >>> few.measure(Features(rows, rows, ["cat", "dog"]))
    [{'labels': '1 per class', 'images': 2, 'acc1': 100.0, 'std': 0.0, 'ci95': 0.0, 'draws': 5}]
    """

    title: ClassVar[str] = "Few labels"

    shots: list[PositiveInt] = [1, 5, 10]
    fractions: list[Annotated[float, Gt(0), Lt(1)]] = [0.01, 0.1]
    draws: PositiveInt = 5
    weight_decay: Annotated[list[NonNegativeFloat], MinLen(1)] = [1e-2]
    max_iterations: PositiveInt = 200
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row per amount: mean ``acc1`` over draws, ``std``, and ``ci95``: half its 95 %
        interval.

        ``std`` and ``ci95`` are over draws of labels, not over training seeds. Amounts that exceed
        the images of a class are left out, with a warning.

        Raises:
            UserError: all amounts exceed the images of a class, or a class has no training image.

        >>> y = torch.arange(2).repeat(10)
        >>> features = Features((torch.eye(2)[y], y), (torch.eye(2)[y], y), ["cat", "dog"])
        >>> (row,) = LowShot(shots=[3], fractions=[]).measure(features)
        >>> row["labels"], row["images"], row["acc1"], row["ci95"]
        ('3 per class', 6, 100.0, 0.0)
        """
        amounts: dict[str, int | float] = {
            **{f"{shots} per class": shots for shots in self.shots},
            **{f"{100 * fraction:g} %": fraction for fraction in self.fractions},
        }
        if not amounts:
            raise ConfigError("shots", [], "nothing to measure", "give shots or fractions")
        counts = features.train[1].bincount(minlength=len(features.class_names)).tolist()
        fewest = min(features.present, key=lambda number: counts[number])
        name, count = features.class_names[fewest], counts[fewest]
        if not count:
            raise UserError(
                f"class {name!r} has no training image, and few labels are of every class; give "
                "images of it, or leave the class out of both splits"
            )
        short = f"class {name!r} has {count} training images"
        # A fraction never exceeds the images of a class.
        possible = {k: v for k, v in amounts.items() if isinstance(v, float) or v <= count}
        if not possible:
            raise ConfigError("shots", self.shots, short, "lower them")
        if len(possible) < len(amounts):
            left_out = ", ".join(label for label in amounts if label not in possible)
            logger.warning(f"few labels: {short}, so {left_out} cannot be measured")
        return [{"labels": k, **self._row(features, v)} for k, v in possible.items()]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Accuracy by amount, such as ``acc1_10_per_class`` and ``acc1_1_percent``."""
        names = [r["labels"].replace(" per ", "_per_").replace(" %", "_percent") for r in rows]
        return {f"acc1_{n}": float(r["acc1"]) for n, r in zip(names, rows, strict=True)}

    def _row(self, features: Features, amount: int | float) -> Row:
        x, y = features.train
        probe = Linear(**self.model_dump(include={"weight_decay", "max_iterations", "seed"}))
        scores, count, labels = [], 0, y.cpu().numpy()
        for draw in range(self.draws):
            rows = _draw_labelled_rows(labels, features.present, amount, self.seed, draw)
            count = len(rows)
            found = probe.probe((x[rows], y[rows]), features.test)
            scores.append(found["acc1"])
        std = half = None
        if self.draws > 1:
            std = statistics.stdev(scores)
            half = float(student_t.ppf(0.975, self.draws - 1)) * std / self.draws**0.5
        mean = statistics.fmean(scores)
        return {"images": count, "acc1": mean, "std": std, "ci95": half, "draws": self.draws}
