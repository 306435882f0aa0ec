"""ProtoSEED: distillation of assignments to prototypes (Lee, 2021, openreview 8la28hZOwug)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from solo_ext.core.errors import ConfigError
from solo_ext.losses.protocpc import protocpc_step
from solo_ext.memory.prototypes import PrototypePrior, Prototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.distillation import Distillation, DistillationKwargs, idle_in_head
from solo_ext.methods.protocpc import (
    ProtoCPC,
    PrototypeKwargs,
    report_settings,
    step_metrics,
    step_settings,
)
from solo_ext.methods.registry import METHODS


class ProtoSEEDKwargs(PrototypeKwargs, DistillationKwargs):
    """``method_kwargs`` of :class:`ProtoSEED`; defaults of the paper.

    Attributes:
        prototypes: which ones the teacher's embeddings are compared with. ``new``: those that the
            student learns; ``old``: those of the teacher's own training, at which the student's
            start.
        num_prototypes: K; null: with ``old`` as many as the teacher has, with ``new`` as in
            :class:`PrototypeKwargs`.

    Example:
        >>> ProtoSEEDKwargs().prototypes, ProtoSEEDKwargs().head
        ('new', 'teacher')
    """

    prototypes: Literal["new", "old"] = "new"


@METHODS.register(
    "protoseed",
    paper="Representation Distillation by Prototypical Contrastive Predictive Coding",
    year=2021,
)
class ProtoSEED(Distillation):
    """Distils a frozen teacher's assignments to prototypes by the ProtoCPC loss (Lee, 2021).

    With one large crop the teacher's assignment of it is the target of every crop; with two, each
    is its own target, and both are the targets of small crops.

    Logs, besides what :class:`Distillation` does, ``train_align`` and ``train_unif``, the two terms
    of the loss, and ``train_prior_perplexity``, the share of the prototypes that the prior spreads
    over.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`ProtoSEEDKwargs`.

    Raises:
        ConfigError: old prototypes of a teacher that has none, or of another number.
    """

    kwargs_type = ProtoSEEDKwargs
    kwargs: ProtoSEEDKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        count, old = self.kwargs.num_prototypes, self.teacher.prototypes
        if old is None:
            assert count is not None  # fill_sizes has replaced null by a number
            self.prototypes = Prototypes(count, self.embed_dim)
        elif count in (None, len(old)):
            self.prototypes = Prototypes.from_rows(old)
        else:
            raise ConfigError(
                "method_kwargs.num_prototypes",
                count,
                f"the teacher has {len(old)}",
                f"take {len(old)}, or prototypes=new",
            )
        self.prior = PrototypePrior(len(self.prototypes.weight), self.kwargs.prior_momentum)
        self._next_prior: Tensor | None = None
        keep_out_of_broadcast(self)

    @classmethod
    def add_and_assert_specific_cfg(cls, cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = super().add_and_assert_specific_cfg(cfg)
        cls.fill_sizes(cfg)
        return cfg

    @staticmethod
    def fill_sizes(cfg: DictConfig, images: int | None = None) -> None:
        """Sets the number of new prototypes if it is null, by the training set."""
        if cfg.method_kwargs.prototypes == "new":
            ProtoCPC.fill_sizes(cfg, images)

    @property
    def keep_prototypes(self) -> bool:
        """Whether the teacher's own prototypes are asked for."""
        return bool(self.kwargs.prototypes == "old")

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the prototypes."""
        return [
            *super().learnable_params,
            {"name": "prototypes", "params": self.prototypes.parameters()},
        ]

    def on_train_start(self) -> None:
        """Reports settings that may surprise."""
        super().on_train_start()
        if self.trainer.is_global_zero:
            idle = idle_in_head(self.kwargs)
            report_settings(self.cfg, ProtoSEEDKwargs, idle)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """Algorithm 1 between student and teacher, plus the online classifier's loss."""
        indices, crops, _ = batch
        out = super().training_step(batch, batch_idx)
        students = out["z"]  # of every crop
        teachers = self.targets(indices, crops)  # of the same large crops, frozen
        loss, metrics = self.distill(students, teachers)
        self.log_step(loss, metrics, students[0], teachers[0])
        return loss + out["loss"]  # type: ignore[no-any-return]

    def distill(
        self, students: Sequence[Tensor], teachers: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """ProtoCPC, or cross-entropy, of every crop with the large crops' assignments.

        Args:
            students: (N, D) embeddings of the student, one per crop.
            teachers: (N, D) embeddings of the teacher, one per large crop.

        Returns:
            Scalar, and what to log.
        """
        terms = protocpc_step(
            torch.stack(list(students)),  # z_s
            torch.stack(list(teachers)),  # z_t
            self.prototypes.weight,  # W_s
            self.prior.value,  # q
            teacher_prototypes=self.teacher.prototypes,  # W_t; None: the student's
            targets=self._targets_of(students[0]),
            **step_settings(self.kwargs),
        )
        self._next_prior = terms.prior
        return terms.loss, step_metrics(terms)

    def _targets_of(self, like: Tensor) -> Tensor | None:
        """(V, U) weights: which large crop's assignment is a target of which crop."""
        large = self.num_large_crops
        if large == 1:
            return None
        small = like.new_full((self.num_small_crops, large), 1 / large, dtype=torch.float32)
        return torch.cat((torch.eye(large, device=like.device), small))

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Updates prototypes and prior."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.prototypes.normalize_()
        if self._next_prior is not None:
            self.prior.commit_(self._next_prior)
            self._next_prior = None
