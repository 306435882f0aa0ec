"""Distillation of assignments to prototypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.memory.prior import PrototypePrior
from solo_ext.memory.prototypes import Prototypes
from solo_ext.methods.distillation import Distillation
from solo_ext.methods.distillation_kwargs import teacher_name
from solo_ext.methods.distillation_report import report_protoseed
from solo_ext.methods.protoseed_kwargs import ProtoSEEDKwargs
from solo_ext.methods.prototype_kwargs import fill_num_prototypes
from solo_ext.methods.prototype_step import commit, compare_assignments
from solo_ext.methods.registry import METHODS
from solo_ext.pretrained.teachers import LoadedTeacher


@METHODS.register(
    "protoseed",
    paper="Representation Distillation by Prototypical Contrastive Predictive Coding",
    year=2021,
)
class ProtoSEED(Distillation):
    """Distils a frozen teacher's assignments to prototypes by the ProtoCPC loss (Lee, 2021).

    With one large crop the teacher's assignment of it is the target of every crop; with two, each
    is its own target, and both are the targets of small crops.

    Logs, besides what :class:`Distillation` does, ``train_align``, ``train_unif`` and
    ``train_prior_perplexity`` as :func:`solo_ext.methods.prototype_step.compare_assignments`.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`ProtoSEEDKwargs`.

    Raises:
        ConfigError: old prototypes of a teacher that has none, or of another number.
    """

    kwargs_type = ProtoSEEDKwargs

    def _prototypes_of(self, loaded: LoadedTeacher) -> Tensor | None:
        kwargs = self.cfg.method_kwargs
        if kwargs.prototypes == "new":
            return None
        name = teacher_name(kwargs.teacher)
        if loaded.prototypes is None:
            raise ConfigError(
                "method_kwargs.prototypes",
                "old",
                f"the teacher came without prototypes: {loaded.description}",
                "take new",
            )
        count = len(loaded.prototypes)
        if kwargs.num_prototypes is None:
            kwargs.num_prototypes = count
        if count != kwargs.num_prototypes:
            raise ConfigError(
                "method_kwargs.num_prototypes",
                kwargs.num_prototypes,
                f"the teacher {name!r} has {count}",
                f"take {count}, or prototypes=new",
            )
        return loaded.prototypes

    def _build(self, kwargs: Any, loaded: LoadedTeacher) -> None:
        old = self.teacher.prototypes
        self.prototypes = (
            Prototypes(kwargs.num_prototypes, loaded.embed_dim)
            if old is None
            else Prototypes.from_rows(old)
        )
        self.prior = PrototypePrior(kwargs.num_prototypes, kwargs.prior_momentum)
        self._next_prior: Tensor | None = None

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = super().add_and_assert_specific_cfg(cfg)
        cls.fill_sizes(cfg)
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Gives new prototypes that have no number one that suits the training set."""
        if cfg.method_kwargs.prototypes == "new":
            fill_num_prototypes(cfg, images)

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the prototypes."""
        return [
            *super().learnable_params,
            {"name": "prototypes", "params": self.prototypes.parameters()},
        ]

    def on_train_start(self) -> None:
        """Says what will not do what a user may think."""
        super().on_train_start()
        if self.trainer.is_global_zero:
            report_protoseed(self.cfg, self.kwargs_type)

    def distill(
        self, students: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """ProtoCPC, or cross-entropy; see :class:`Distillation`."""
        return compare_assignments(
            self, students, targets, self._targets(students[0]), self.teacher.prototypes
        )

    def _targets(self, like: Tensor) -> Tensor | None:
        large = self.num_large_crops
        if large == 1:
            return None
        small = like.new_full((self.num_small_crops, large), 1 / large, dtype=torch.float32)
        return torch.cat((torch.eye(large, device=like.device), small))

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Moves prototypes and prior on."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        commit(self)
