"""``eval retrieval``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen

from solo_ext.config.types import PositiveInt
from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.protocols.base import FeatureProtocol, Row
from solo_ext.lab.evaluation.retrieval import retrieval_scores


class Retrieval(FeatureProtocol):
    """Settings of ``eval retrieval``: test images ask, the gallery answers.

    ``gallery``: the test split without the image itself, or the train split.
    """

    title: ClassVar[str] = "Retrieval"

    k: Annotated[list[PositiveInt], MinLen(1)] = [1, 5, 10]
    gallery: Literal["test", "train"] = "test"

    def measure(self, features: Features) -> list[Row]:
        """One row: ``map`` and ``recall_<k>`` in percent, ``queries`` that have an answer."""
        queries, targets = features.split("test")
        gallery, labels = (None, None) if self.gallery == "test" else features.split("train")
        try:
            found = retrieval_scores(queries, targets, gallery, labels, self.k, features.device)
        except ValueError as error:
            other = "train" if self.gallery == "test" else "test"
            raise ConfigError(
                "gallery",
                self.gallery,
                str(error),
                f"give more images of a class, or take gallery={other}",
            ) from error
        recalls = {f"recall_{k}": value for k, value in found.recall.items()}
        return [
            {
                "gallery": self.gallery,
                "map": found.mean_average_precision,
                **recalls,
                "queries": found.queries,
            }
        ]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """``map`` and the recalls."""
        kept = ("map", "recall_")
        return {k: float(v) for k, v in rows[0].items() if k.startswith(kept)}
