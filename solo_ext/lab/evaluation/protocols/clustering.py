"""``eval clustering``."""

from __future__ import annotations

import statistics
from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from annotated_types import Gt

from solo_ext.clustering import kmeans
from solo_ext.config.types import NonNegativeInt, PositiveInt
from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.cluster_scores import cluster_scores
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.protocols.base import FeatureProtocol, Row


class Clusters(FeatureProtocol):
    """Settings of ``eval clustering``: k-means of L2-normalised features against the classes.

    Without ``k`` there are as many clusters as classes.
    """

    title: ClassVar[str] = "Clustering"

    k: list[Annotated[int, Gt(1)]] | None = None
    seeds: PositiveInt = 3
    restarts: PositiveInt = 5
    iterations: PositiveInt = 50
    split: Literal["train", "test"] = "test"
    first_seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row per k: means and sample deviations over seeds, in percent."""
        rows, targets = features.split(self.split)
        if self.k is None and features.classes < 2:
            raise ConfigError(
                "k", None, "there is one class, which any clusters agree with", "give k"
            )
        unit = F.normalize(rows.to(features.device).float(), dim=1)
        found = []
        for place, k in enumerate([features.classes] if self.k is None else self.k):
            if k > len(unit):
                raise ConfigError(
                    "k" if self.k is None else f"k.{place}",
                    k,
                    f"the {self.split} split has {len(unit)} labelled images",
                    "take fewer clusters, or split=train",
                )
            scores = []
            for number in range(self.seeds):
                clusters = kmeans(
                    unit,
                    k,
                    restarts=self.restarts,
                    iterations=self.iterations,
                    seed=self.first_seed + number,
                )
                scores.append(cluster_scores(targets, clusters.assignments))
            row: Row = {"k": k, "seeds": self.seeds}
            for name in ("nmi", "ari", "accuracy", "purity"):
                values = [getattr(s, name) for s in scores]
                row[name] = statistics.fmean(values)
                row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
            found.append(row)
        return found

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Of the first k."""
        return {name: float(rows[0][name]) for name in ("nmi", "ari", "accuracy")}
