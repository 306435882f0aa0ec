"""solo-learn's base classes with a projector."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.host import BaseMethod, BaseMomentumMethod


class ProjectedMethod(BaseMethod):
    """Adds the embeddings of ``projector`` (N, F) -> (N, D), which subclasses make."""

    projector: nn.Module

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the projector."""
        return [
            *super().learnable_params,
            {"name": "projector", "params": self.projector.parameters()},
        ]

    def forward(self, X: Tensor) -> dict[str, Any]:
        """Adds the embeddings ``z`` (N, D)."""
        out: dict[str, Any] = super().forward(X)
        return {**out, "z": self.projector(out["feats"])}

    def multicrop_forward(self, X: Tensor) -> dict[str, Any]:
        """Adds the embeddings ``z`` (N, D) of a small crop."""
        out: dict[str, Any] = super().multicrop_forward(X)
        return {**out, "z": self.projector(out["feats"])}


class ProjectedMomentumMethod(ProjectedMethod, BaseMomentumMethod):
    """Adds those of ``momentum_projector``, too, which follows the other."""

    momentum_projector: nn.Module

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the section ``momentum``, which solo-learn does not where there is none."""
        cfg.momentum = cfg.get("momentum") or {}
        return BaseMomentumMethod.add_and_assert_specific_cfg(cfg)

    @property
    def momentum_pairs(self) -> list[tuple[Any, Any]]:
        """Adds the projectors."""
        return [*super().momentum_pairs, (self.projector, self.momentum_projector)]

    @torch.no_grad()
    def momentum_forward(self, X: Tensor) -> dict[str, Any]:
        """Adds the embeddings ``z`` (N, D)."""
        out: dict[str, Any] = super().momentum_forward(X)
        return {**out, "z": self.momentum_projector(out["feats"])}
