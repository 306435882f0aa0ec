"""The release's built-in methods behind main's constructor."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from solo_ext.host.release_1_0_2.base import BaseMethod

_OF_MAIN_ALONE = {
    "simsiam": {"temperature"},
    "ressl": {"base_tau_momentum", "final_tau_momentum", "momentum_classifier"},
}
_ARGUMENTS: dict[str, dict[str, Any]] = {"simclr": {"supervised": False}}


class Native:
    """Mixin of a built-in method: takes main's config and the release's steps.

    The release's steps project the features themselves, so that the shared part of the step
    must not call the method's own ``forward``: batch norm would see every batch twice.
    """

    method_name: str

    def __init__(self, cfg: DictConfig) -> None:
        kwargs: Any = OmegaConf.to_container(cfg.method_kwargs, resolve=True)
        for name in _OF_MAIN_ALONE.get(self.method_name, ()):
            kwargs.pop(name, None)
        super().__init__(cfg=cfg, **kwargs, **_ARGUMENTS.get(self.method_name, {}))  # type: ignore[call-arg]

    def base_training_step(self, X: Tensor, targets: Tensor) -> dict[str, Any]:
        """Backbone and classifier only."""
        return self._with_class_metrics(BaseMethod.forward(self, X), targets)  # type: ignore

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """DINO's own clipping takes one number; Lightning's hook of that name takes more."""
        if len(args) == 1 and not kwargs:
            super().clip_gradients(args[0])  # type: ignore[misc]
        else:
            pl.LightningModule.clip_gradients(self, *args, **kwargs)  # type: ignore[arg-type]


class Whitening2d(nn.Module):
    """Whitening of W-MSE by a Cholesky factor (Ermolov et al. 2021, arXiv 2007.06346).

    The release's own calls ``torch.cholesky``, which is gone.

    Args:
        output_dim: D.
        eps: shrinkage of the covariance towards the identity.
    """

    def __init__(self, output_dim: int, eps: float = 0.0) -> None:
        super().__init__()
        self.output_dim, self.eps = output_dim, eps

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to whitened (N, D), in fp32."""
        with torch.autocast(x.device.type, enabled=False):
            centred = x.float() - x.float().mean(dim=0)
            covariance = centred.T @ centred / (len(x) - 1)
            eye = torch.eye(self.output_dim, device=x.device)
            factor = torch.linalg.cholesky((1 - self.eps) * covariance + self.eps * eye)
            whitened: Tensor = torch.linalg.solve_triangular(factor, centred.T, upper=False)
            return whitened.T


def natives(methods: dict[str, type]) -> dict[str, type]:
    """The release's methods, each with main's constructor, under the same names.

    Args:
        methods: ``solo.methods.METHODS`` of the release.
    """
    made = {}
    for name, own in methods.items():
        if name in ("base", "linear"):
            continue
        hooks: dict[str, Any] = {"method_name": name, "__module__": own.__module__}
        if "clip_gradients" not in vars(own):
            hooks["clip_gradients"] = pl.LightningModule.clip_gradients
        made[name] = type(own.__name__, (Native, own), hooks)
    return made
