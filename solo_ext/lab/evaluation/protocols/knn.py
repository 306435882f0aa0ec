"""``eval knn``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import MinLen

from solo_ext.config.types import PositiveFloat, PositiveInt
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.protocols.base import FeatureProtocol, Row
from solo_ext.memory.knn import knn_accuracy


class KNN(FeatureProtocol):
    """Settings of ``eval knn``: every k with every temperature, from one pass."""

    title: ClassVar[str] = "Weighted cosine kNN"

    k: Annotated[list[PositiveInt], MinLen(1)] = [1, 5, 20, 200]
    temperature: Annotated[list[PositiveFloat], MinLen(1)] = [0.07, 0.1]

    def measure(self, features: Features) -> list[Row]:
        """One row per k and temperature: ``k``, ``temperature``, ``acc1``, ``acc5``."""
        features.check_labelled()
        scores = knn_accuracy(
            features.test.to(features.device),
            features.test_targets,
            features.train.to(features.device),
            features.train_targets,
            ks=self.k,
            temperatures=self.temperature,
        )
        return [
            {"k": k, "temperature": t, "acc1": tops[1], "acc5": tops[5]}
            for (k, t), tops in scores.items()
        ]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """At k = 20, or at the first k."""
        chosen = next((r for r in rows if r["k"] == 20), rows[0])
        return {"acc1": float(chosen["acc1"])}
