"""``eval geometry``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt

from solo_ext.config.types import NonNegativeInt
from solo_ext.core.errors import ConfigError
from solo_ext.lab.evaluation.feature_geometry import feature_geometry
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.protocols.base import FeatureProtocol, Row


class FeatureSpace(FeatureProtocol):
    """Settings of ``eval geometry``: spread and collapse of the features of a split.

    Of more than ``samples`` images that many are drawn by ``seed``.
    """

    title: ClassVar[str] = "Geometry and collapse"

    split: Literal["train", "test"] = "test"
    samples: Annotated[int, Gt(1)] = 10_000
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row: the numbers of :class:`solo_ext.lab.evaluation.feature_geometry.Geometry`."""
        rows, targets = features.split(self.split)
        if len(rows) < 2:
            other = "train" if self.split == "test" else "test"
            raise ConfigError(
                "split",
                self.split,
                "it has one labelled image, and the spread of features needs two",
                f"give more images, or take split={other}",
            )
        if len(rows) > self.samples:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randperm(len(rows), generator=generator)[: self.samples]
            rows, targets = rows[drawn], targets[drawn]
        found = asdict(feature_geometry(rows.to(features.device), targets))
        plain = {k: None if v != v else v for k, v in found.items()}
        return [{"images": len(rows), "dimensions": rows.shape[1], **plain}]

    @classmethod
    def headline(cls, rows: list[Row]) -> dict[str, float]:
        """``effective_rank``, ``uniformity``, ``dead``."""
        return {k: float(rows[0][k]) for k in ("effective_rank", "uniformity", "dead")}
