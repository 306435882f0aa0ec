"""solo-learn's base classes with a projector, without and with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from solo_ext.core.types import PositiveInt, Section
from solo_ext.host import BaseMethod, BaseMomentumMethod
from solo_ext.losses import alignment_loss_func, uniformity_loss_func
from solo_ext.losses.alignment import effective_rank
from solo_ext.memory.heads import projector


class ProjectorKwargs(Section):
    """The projector's settings in ``method_kwargs``.

    Attributes:
        proj_hidden_dim: width of the projector's hidden layers.
        proj_output_dim: D of the embeddings.
        proj_layers: number of linear layers of the projector.
        proj_batch_norm: whether the projector's hidden layers have batch norm.

    Example:
        >>> ProjectorKwargs(proj_output_dim=64).proj_hidden_dim
        2048
    """

    proj_hidden_dim: PositiveInt = 2048
    proj_output_dim: PositiveInt = 128
    proj_layers: PositiveInt = 2
    proj_batch_norm: bool = True


class ProjectedMethod(BaseMethod):
    """Adds the embeddings of a ``projector`` (N, F) -> (N, D), which subclasses create.

    Logs once per epoch the :meth:`geometry` of the last batch's embeddings.

    Attributes:
        step_embeddings: outputs of projector and predictor in the last training step, (N, D) for
            each crop, without gradient; ``on_nonfinite`` checks their norms.

    Example:
        >>> from solo_ext.methods.registry import example_config
        >>> class Mine(ProjectedMethod):
        ...     def __init__(self, cfg):
        ...         super().__init__(cfg)
        ...         self.projector = nn.Linear(self.features_dim, 16)
        >>> method = Mine(example_config("mine"))
        >>> method(torch.randn(4, 3, 32, 32))["z"].shape
        torch.Size([4, 16])
    """

    projector: nn.Module

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.step_embeddings: list[Tensor] = []
        # A step reads no key of OmegaConf's, which takes some forty Python calls.
        self._seed: int = self.cfg.get("seed") or 0
        self._loss_name = f"train_{self.cfg.method}_loss"

    def _new_projector(self, kwargs: ProjectorKwargs, **more: Any) -> nn.Module:
        return projector(
            self.features_dim,
            kwargs.proj_hidden_dim,
            kwargs.proj_output_dim,
            batch_norm=kwargs.proj_batch_norm,
            layers=kwargs.proj_layers,
            **more,
        )

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

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks whose embeddings an E-step clusters."""
        return [self.backbone, self.projector]

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) that an E-step clusters."""
        z: Tensor = self(X)["z"]
        return z

    def log_step(
        self, loss: Tensor, metrics: dict[str, Tensor], embeddings: Sequence[Tensor]
    ) -> None:
        """Logs ``train_<method>_loss`` and the metrics; keeps :attr:`step_embeddings`."""
        self.step_embeddings = [z.detach() for z in embeddings]
        metrics = {self._loss_name: loss, **metrics}
        self.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=True)

    def geometry(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """Metrics of ``views``, unit-norm embeddings (N, D) of each crop."""
        z1, z2 = views[:2]
        return {
            "train_effective_rank": effective_rank(z1),
            "train_alignment": alignment_loss_func(z1, z2),
            "train_uniformity": uniformity_loss_func(z1),
        }

    def on_train_epoch_end(self) -> None:
        """Logs the geometry of the last batch's embeddings."""
        super().on_train_epoch_end()
        # Compute this once per epoch and not per step, because the host waits for the device.
        views, self.step_embeddings = self.step_embeddings, []
        if views:
            unit = [F.normalize(z.float(), dim=1) for z in views]
            self.log_dict(self.geometry(unit), sync_dist=True)


class ProjectedMomentumMethod(ProjectedMethod, BaseMomentumMethod):
    """Adds the embeddings of ``momentum_projector``, a moving average of ``projector``.

    Example:
        >>> from solo_ext.methods.registry import example_config
        >>> class Mine(ProjectedMomentumMethod):
        ...     def __init__(self, cfg):
        ...         super().__init__(cfg)
        ...         self.projector = nn.Linear(self.features_dim, 16)
        ...         self.momentum_projector = nn.Linear(self.features_dim, 16)
        >>> method = Mine(Mine.add_and_assert_specific_cfg(example_config("mine")))
        >>> z = method.momentum_forward(torch.randn(4, 3, 32, 32))["z"]
        >>> z.shape, z.requires_grad
        (torch.Size([4, 16]), False)
    """

    momentum_projector: nn.Module

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in ``momentum`` even if the config lacks this section, where solo-learn fails."""
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

    @property
    def embedder(self) -> list[nn.Module]:
        """The networks whose embeddings an E-step clusters: f' of PCL's Algorithm 1."""
        return [self.momentum_backbone, self.momentum_projector]

    def embed(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) that an E-step clusters: v' = f'(x)."""
        z: Tensor = self.momentum_forward(X)["z"]
        return z
