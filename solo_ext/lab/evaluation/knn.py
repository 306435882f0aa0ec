"""Protocols on cosine similarities: weighted kNN, and retrieval."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import MinLen

from solo_ext.core.errors import ConfigError
from solo_ext.core.types import PositiveFloat, PositiveInt
from solo_ext.lab.evaluation.features import Features
from solo_ext.lab.evaluation.protocol import FeatureProtocol, Row
from solo_ext.memory.knn import cosines, inverse_norms, knn_accuracy

_MAX_ELEMENTS = 2**21


class KNN(FeatureProtocol):
    """Settings of ``eval knn``: every k with every temperature, from one pass.

    >>> KNN(k=[20])
    KNN(k=[20], temperature=[0.07, 0.1])
    """

    title: ClassVar[str] = "Weighted cosine kNN"

    k: Annotated[list[PositiveInt], MinLen(1)] = [1, 5, 20, 200]
    temperature: Annotated[list[PositiveFloat], MinLen(1)] = [0.07, 0.1]

    def measure(self, features: Features) -> list[Row]:
        """One row per k and temperature: ``k``, ``temperature``, ``acc1``, ``acc5``.

        >>> rows = torch.eye(6), torch.arange(6)
        >>> KNN(k=[1], temperature=[0.1]).measure(Features(rows, rows, list("abcdef")))
        [{'k': 1, 'temperature': 0.1, 'acc1': 100.0, 'acc5': 100.0}]
        """
        (bank, labels), (queries, targets) = features.train, features.test
        scores = knn_accuracy(
            queries, targets, bank, labels, ks=self.k, temperatures=self.temperature
        )
        return [
            {"k": k, "temperature": t, "acc1": tops[1], "acc5": tops[5]}
            for (k, t), tops in scores.items()
        ]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """Accuracy at k = 20, or else at the first k."""
        chosen = next((r for r in rows if r["k"] == 20), rows[0])
        return {"acc1": float(chosen["acc1"])}


class Retrieval(FeatureProtocol):
    """Settings of ``eval retrieval``: test images are the queries, ``gallery`` is ranked.

    ``gallery``: the test split without the image itself, or the train split.

    >>> rows = torch.eye(2).repeat(3, 1), torch.arange(2).repeat(3)
    >>> Retrieval(k=[1]).measure(Features(rows, rows, ["cat", "dog"]))
    [{'gallery': 'test', 'map': 100.0, 'recall_1': 100.0, 'queries': 6}]
    """

    title: ClassVar[str] = "Retrieval"

    k: Annotated[list[PositiveInt], MinLen(1)] = [1, 5, 10]
    gallery: Literal["test", "train"] = "test"

    @torch.no_grad()
    def measure(self, features: Features) -> list[Row]:
        """One row: ``map``, ``recall_<k>`` in percent, and the number of ``queries``.

        The gallery is ranked by cosine for every query; rows of the query's class are relevant.
        Average precision is ``mean_{relevant r} |{relevant up to rank r}| / rank(r)`` over the
        whole ranking, recall the share of queries with a relevant row among the first k. Equal
        similarities keep the order of the gallery. Queries without a relevant row are left out.
        """
        (queries, targets), (rows, labels) = features.test, getattr(features, self.gallery)
        alone = self.gallery == "test"
        scale, size = inverse_norms(rows), max(1, _MAX_ELEMENTS // len(rows))
        precision = torch.zeros((), dtype=torch.float64, device=rows.device)
        hits = {k: torch.zeros((), dtype=torch.int64, device=rows.device) for k in self.k}
        count = torch.zeros((), dtype=torch.int64, device=rows.device)
        for start in range(0, len(queries), size):
            similarity = cosines(queries[start : start + size], rows, scale)
            if alone:
                # Mask the query itself: it sorts last and is sliced off.
                similarity.diagonal(start).fill_(float("-inf"))
            order = similarity.argsort(dim=1, descending=True, stable=True)[:, : len(rows) - alone]
            relevant = labels[order] == targets[start : start + size, None]
            ranks = torch.arange(1, order.shape[1] + 1, device=rows.device)
            share = relevant.cumsum(1) / ranks
            average = (share * relevant).sum(1, dtype=torch.float64) / relevant.sum(1).clamp_min(1)
            precision += average.sum()
            count += relevant.any(1).sum()
            for k in self.k:
                hits[k] += relevant[:, :k].any(1).sum()
        total = int(count)
        if not total:
            problem = "no query shares its class with a row of the gallery"
            other = "train" if alone else "test"
            remedy = f"give more images of a class, or take gallery={other}"
            raise ConfigError("gallery", self.gallery, problem, remedy)
        recalls = {f"recall_{k}": 100 * int(hit) / total for k, hit in hits.items()}
        found = {"map": 100 * float(precision) / total, **recalls, "queries": total}
        return [{"gallery": self.gallery, **found}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """``map`` and the recalls."""
        return {k: float(v) for k, v in rows[0].items() if k.startswith(("map", "recall_"))}
