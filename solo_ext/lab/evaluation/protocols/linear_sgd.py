"""``eval linear_sgd``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Gt, Lt, MinLen

from solo_ext.config.types import LearningRate, NonNegativeFloat, NonNegativeInt, PositiveInt
from solo_ext.lab.evaluation.frozen_features import Features
from solo_ext.lab.evaluation.linear_sgd import sweep_linear_probes
from solo_ext.lab.evaluation.protocols.base import FeatureProtocol, Row


class LinearSGD(FeatureProtocol):
    """Settings of ``eval linear_sgd``: a grid of rates and penalties, trained at once."""

    title: ClassVar[str] = "Linear probe, SGD sweep"

    learning_rate: Annotated[list[LearningRate], MinLen(1)] = [
        *(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
    ]
    weight_decay: Annotated[list[NonNegativeFloat], MinLen(1)] = [0.0, 1e-3]
    epochs: PositiveInt = 30
    sgd_batch_size: PositiveInt = 256
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.2
    seed: NonNegativeInt = 0

    def measure(self, features: Features) -> list[Row]:
        """One row: accuracies, the chosen ``learning_rate`` and ``weight_decay``.

        ``at_edge`` says that the rate is the largest or smallest of several: widen the grid. It is
        ``None`` where no class has two training images, so that none could be held out to choose.
        """
        features.check_labelled()
        found = sweep_linear_probes(
            features.train,
            features.train_targets,
            features.test,
            features.test_targets,
            learning_rates=self.learning_rate,
            weight_decays=self.weight_decay,
            epochs=self.epochs,
            batch_size=self.sgd_batch_size,
            holdout=self.holdout,
            seed=self.seed,
            device=features.device,
        )
        chosen = found.learning_rate
        edges = (min(self.learning_rate), max(self.learning_rate))
        several = len(set(self.learning_rate)) > 1
        return [
            {
                "acc1": found.accuracy,
                "acc5": found.top5,
                "train_acc1": found.train_accuracy,
                "held_out_acc1": max(found.held_out.values(), default=None),
                "learning_rate": chosen,
                "weight_decay": found.weight_decay,
                "at_edge": None if several and not found.held_out else several and chosen in edges,
            }
        ]
