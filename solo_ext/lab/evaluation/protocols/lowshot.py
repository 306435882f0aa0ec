"""``eval lowshot``."""

from __future__ import annotations

import statistics
from typing import Annotated, ClassVar

from annotated_types import Gt, Lt, MinLen
from scipy.stats import t as student_t

from solo_ext.config.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.labelled_draw import labelled_draw
from solo_ext.lab.evaluation.linear import linear_probe
from solo_ext.lab.evaluation.protocols.base import FeatureProtocol, Row


class LowShot(FeatureProtocol):
    """Settings of ``eval lowshot``: linear probes on few labels, over repeated draws.

    ``shots`` are labels per class, ``fractions`` shares of every class. Several penalties are
    chosen from on a hold-out of the draw, one is used as it is.
    """

    title: ClassVar[str] = "Few labels"

    shots: list[PositiveInt] = [1, 5, 10]
    fractions: list[Annotated[float, Gt(0), Lt(1)]] = [0.01, 0.1]
    draws: PositiveInt = 5
    weight_decay: Annotated[list[NonNegativeFloat], MinLen(1)] = [1e-2]
    max_iterations: PositiveInt = 200
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row per amount: ``acc1`` is a mean over draws.

        ``std`` is their sample deviation, ``ci95`` half the 95 % interval of the mean by Student's
        t: over draws of labels, not over training seeds. Where some amounts are more than a class
        has, they have no numbers, and ``note`` says which class it is.

        Raises:
            UserError: every amount is more, or a class has no training image at all.
        """
        features.check_labelled()
        amounts = [
            *((f"{shots} per class", shots, f"shots.{i}") for i, shots in enumerate(self.shots)),
            *((f"{100 * f:g} %", f, f"fractions.{i}") for i, f in enumerate(self.fractions)),
        ]
        if not amounts:
            raise ConfigError("shots", [], "nothing to measure", "give shots or fractions")
        label, count = _smallest_class(features)
        if not count:
            raise UserError(
                f"class {features.name_of(label)} has no training image, and few labels are of "
                "every class; give images of it, or leave the class out of both splits"
            )
        short = f"class {features.name_of(label)} has {count} training images"
        # A fraction takes one image at least, and never more than there are.
        possible = [not isinstance(amount, int) or amount <= count for _, amount, _ in amounts]
        if not any(possible):
            raise ConfigError(amounts[0][2], amounts[0][1], short, "lower it")
        rows = [
            self._row(features, name, amount) if fits else _without(name)
            for (name, amount, _), fits in zip(amounts, possible, strict=True)
        ]
        if all(possible):
            return rows
        return [
            {**row, "note": "" if fits else short} for row, fits in zip(rows, possible, strict=True)
        ]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """By amount, such as ``acc1_10_per_class``; without those that a class has too few for."""
        names = {" per class": "_per_class", " %": "_percent"}
        found = {}
        for row in rows:
            if row["acc1"] is None:
                continue
            name = row["labels"]
            for old, new in names.items():
                name = name.replace(old, new)
            found[f"acc1_{name}"] = float(row["acc1"])
        return found

    def _row(self, features: Features, label: str, amount: int | float) -> Row:
        labels = features.train_targets.numpy()
        train = features.train
        accuracies, count = [], 0
        for draw in range(self.draws):
            rows = labelled_draw(labels, range(features.classes), amount, self.seed, draw)
            count = len(rows)
            result = linear_probe(
                train[rows].to(features.device),
                features.train_targets[rows],
                features.test,
                features.test_targets,
                weight_decays=self.weight_decay,
                max_iterations=self.max_iterations,
                seed=self.seed,
            )
            accuracies.append(result.accuracy)
        std = statistics.stdev(accuracies) if self.draws > 1 else None
        half = None
        if std is not None:
            half = float(student_t.ppf(0.975, self.draws - 1)) * std / self.draws**0.5
        return {
            "labels": label,
            "images": count,
            "acc1": statistics.fmean(accuracies),
            "std": std,
            "ci95": half,
            "draws": self.draws,
        }


def _smallest_class(features: Features) -> tuple[int, int]:
    """Number of the class with the fewest training images, the first of equals, and their count."""
    targets = features.train_targets
    counts = targets[targets >= 0].bincount(minlength=features.classes)
    label = int(counts.argmin())
    return label, int(counts[label])


def _without(label: str) -> Row:
    return {"labels": label, "images": None, "acc1": None, "std": None, "ci95": None, "draws": None}
