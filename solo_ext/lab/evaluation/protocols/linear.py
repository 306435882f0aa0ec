"""``eval linear``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Gt, Lt, MinLen

from solo_ext.config.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.linear import linear_probe
from solo_ext.lab.evaluation.protocols.base import FeatureProtocol, Row


class Linear(FeatureProtocol):
    """Settings of ``eval linear``: penalties to choose from, the share of training held out."""

    title: ClassVar[str] = "Linear probe, L-BFGS"

    weight_decay: Annotated[list[NonNegativeFloat], MinLen(1)] = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.2
    max_iterations: PositiveInt = 200
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row: ``acc1``, ``acc5``, ``train_acc1``, the chosen ``weight_decay``."""
        features.check_labelled()
        result = linear_probe(
            features.train.to(features.device),
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
