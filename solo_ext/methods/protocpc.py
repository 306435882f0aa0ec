"""ProtoCPC as a self-supervised method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.host import initialize_momentum_params
from solo_ext.memory.heads import projector
from solo_ext.memory.prior import PrototypePrior
from solo_ext.memory.prototypes import Prototypes
from solo_ext.memory.state import keep_out_of_broadcast
from solo_ext.methods.distillation_report import report_protocpc
from solo_ext.methods.projected import ProjectedMomentumMethod
from solo_ext.methods.protocpc_kwargs import ProtoCPCKwargs
from solo_ext.methods.prototype_kwargs import fill_num_prototypes
from solo_ext.methods.prototype_step import commit, compare_assignments
from solo_ext.methods.registry import METHODS, fill_method_kwargs, require_two_views


@METHODS.register(
    "protocpc",
    paper="Representation Distillation by Prototypical Contrastive Predictive Coding",
    year=2021,
)
class ProtoCPC(ProjectedMomentumMethod):
    """Every crop predicts the momentum teacher's assignment of the other large crops (Lee, 2021).

    Teacher and student share the student's prototypes.

    Logs ``train_protocpc_loss``, ``train_align``, ``train_unif`` and ``train_prior_perplexity`` as
    :func:`solo_ext.methods.prototype_step.compare_assignments`, and once per epoch
    ``train_effective_rank``, ``train_alignment`` and ``train_uniformity`` of the last batch.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`ProtoCPCKwargs`.
    """

    kwargs_type = ProtoCPCKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        kwargs = self.cfg.method_kwargs
        self.projector, self.momentum_projector = (self._new_projector() for _ in range(2))
        initialize_momentum_params(self.projector, self.momentum_projector)
        self.prototypes = Prototypes(kwargs.num_prototypes, kwargs.proj_output_dim)
        self.prior = PrototypePrior(kwargs.num_prototypes, kwargs.prior_momentum)
        self._next_prior: Tensor | None = None
        keep_out_of_broadcast(self)

    def _new_projector(self) -> nn.Module:
        kwargs = self.cfg.method_kwargs
        return projector(
            self.features_dim,
            kwargs.proj_hidden_dim,
            kwargs.proj_output_dim,
            batch_norm=kwargs.proj_batch_norm,
            layers=kwargs.proj_layers,
        )

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = ProjectedMomentumMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg, small=True)
        cfg = fill_method_kwargs(cfg, ProtoCPCKwargs)
        fill_num_prototypes(cfg)
        return cfg

    fill_sizes = staticmethod(fill_num_prototypes)

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
            report_protocpc(self.cfg, self.kwargs_type)

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """The ProtoCPC loss plus the online classifier's."""
        out = super().training_step(batch, batch_idx)
        loss, metrics = self.compare(out["z"], out["momentum_z"])
        self.keep_for_geometry(out["z"])
        self.log_dict(
            {"train_protocpc_loss": loss, **metrics}, on_step=False, on_epoch=True, sync_dist=True
        )
        return loss + out["loss"]  # type: ignore[no-any-return]

    def compare(
        self, students: Sequence[Tensor], teachers: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The method's loss, the mean over pairs of a crop and another large crop.

        Args:
            students: (N, D) embeddings, one per crop.
            teachers: (N, D) momentum embeddings, one per large crop.

        Returns:
            Scalar, and what to log.
        """
        large = len(teachers)
        device = students[0].device
        others = torch.ones(len(students), large, device=device)
        others[:large] -= torch.eye(large, device=device)
        return compare_assignments(self, students, teachers, others)

    def on_after_backward(self) -> None:
        """Leaves the prototypes as they are in the first epochs."""
        super().on_after_backward()
        if self.current_epoch < self.cfg.method_kwargs.freeze_prototypes_epochs:
            self.prototypes.weight.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Any], batch_idx: int) -> None:
        """Moves the momentum networks, prototypes and prior on."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        commit(self)
