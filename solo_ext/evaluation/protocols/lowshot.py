"""``eval lowshot``."""

from __future__ import annotations

import statistics
from typing import Annotated, ClassVar

from annotated_types import Gt, Lt, MinLen
from scipy.stats import t as student_t

from solo_ext.config.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from solo_ext.errors import ConfigError
from solo_ext.evaluation.frozen_features import Features
from solo_ext.evaluation.labelled_draw import labelled_draw
from solo_ext.evaluation.linear import linear_probe
from solo_ext.evaluation.protocols.base import FeatureProtocol, Row


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
        t: over draws of labels, not over training seeds.
        """
        amounts = [
            *((f"{shots} per class", shots, f"shots.{i}") for i, shots in enumerate(self.shots)),
            *((f"{100 * f:g} %", f, f"fractions.{i}") for i, f in enumerate(self.fractions)),
        ]
        if not amounts:
            raise ConfigError("shots", [], "nothing to measure", "give shots or fractions")
        return [self._row(features, *amount) for amount in amounts]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """By amount, such as ``acc1_10_per_class``."""
        names = {" per class": "_per_class", " %": "_percent"}
        found = {}
        for row in rows:
            name = row["labels"]
            for old, new in names.items():
                name = name.replace(old, new)
            found[f"acc1_{name}"] = float(row["acc1"])
        return found

    def _row(self, features: Features, label: str, amount: int | float, key: str) -> Row:
        labels = features.train_targets.numpy()
        train = features.train
        accuracies, count = [], 0
        for draw in range(self.draws):
            try:
                rows = labelled_draw(labels, range(features.classes), amount, self.seed, draw)
            except ValueError as error:
                raise ConfigError(key, amount, str(error).partition(",")[0], "lower it") from None
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
