"""The protocols of ``solo-ext eval``: settings, and what they measure on frozen features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt, Lt, MinLen
from torch import Tensor

from solo_ext.config.schema import Section
from solo_ext.config.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from solo_ext.evaluation.linear import linear_probe
from solo_ext.modules.knn import knn_accuracy


@dataclass(frozen=True)
class Features:
    """Frozen features of both splits; rows with target -1 carry no label.

    Attributes:
        train: (n, D).
        train_targets: (n,).
        test: (m, D).
        test_targets: (m,).
    """

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_targets: Tensor


class KNN(Section):
    """Settings of ``eval knn``: every k with every temperature, from one pass."""

    k: Annotated[list[PositiveInt], MinLen(1)] = [1, 5, 20, 200]
    temperature: Annotated[list[PositiveFloat], MinLen(1)] = [0.07, 0.1]

    def measure(self, features: Features) -> list[dict[str, Any]]:
        """One row per k and temperature: ``k``, ``temperature``, ``acc1``, ``acc5``."""
        scores = knn_accuracy(
            features.test,
            features.test_targets,
            features.train,
            features.train_targets,
            ks=self.k,
            temperatures=self.temperature,
        )
        return [
            {"k": k, "temperature": t, "acc1": tops[1], "acc5": tops[5]}
            for (k, t), tops in scores.items()
        ]


class Linear(Section):
    """Settings of ``eval linear``: penalties to choose from, the share of training held out."""

    weight_decay: Annotated[list[NonNegativeFloat], MinLen(1)] = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.2
    max_iterations: PositiveInt = 200
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[dict[str, Any]]:
        """One row: ``acc1``, ``acc5``, ``train_acc1``, the chosen ``weight_decay``."""
        result = linear_probe(
            features.train,
            features.train_targets,
            features.test,
            features.test_targets,
            weight_decays=self.weight_decay,
            holdout=self.holdout,
            max_iterations=self.max_iterations,
            seed=self.seed,
        )
        return [
            {
                "acc1": result.accuracy,
                "acc5": result.top5,
                "train_acc1": result.train_accuracy,
                "weight_decay": result.weight_decay,
            }
        ]


PROTOCOLS: dict[str, type[KNN] | type[Linear]] = {"knn": KNN, "linear": Linear}


def headline(protocol: str, rows: list[dict[str, Any]]) -> float:
    """The one number of a protocol: kNN at k 20 (or the first k), the probe's top-1."""
    if protocol == "knn":
        rows = [r for r in rows if r["k"] == 20] or rows
    return float(rows[0]["acc1"])
