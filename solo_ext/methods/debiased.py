"""Debiased contrastive learning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from solo_ext.config.types import PositiveFloat, PositiveInt, ProbabilityBelowOne, method_kwargs
from solo_ext.host import BaseMethod
from solo_ext.losses.debiased import debiased_terms
from solo_ext.methods.registry import METHODS, fill_method_kwargs, require_two_views
from solo_ext.modules.heads import projector


@method_kwargs
class DebiasedKwargs:
    """``method_kwargs`` of :class:`Debiased`; defaults of the official code.

    Attributes:
        proj_hidden_dim: width of the projector's hidden layer.
        proj_output_dim: D of the embeddings.
        proj_batch_norm: batch norm in the projector.
        temperature: above 0.
        tau_plus: in [0, 1), prior share of negatives of the anchor's class; 0 is SimCLR's loss.
    """

    proj_hidden_dim: PositiveInt = 512
    proj_output_dim: PositiveInt = 128
    proj_batch_norm: bool = True
    temperature: PositiveFloat = 0.5
    tau_plus: ProbabilityBelowOne = 0.1


@METHODS.register("debiased", paper="Debiased Contrastive Learning", year=2020, arxiv="2007.00224")
class Debiased(BaseMethod):
    """SimCLR with the debiased estimate of the negatives (Chuang et al., 2020, arXiv 2007.00224).

    Logs ``train_debiased_loss`` and ``train_floored``, the share of anchors whose estimate sits
    on its floor: those get no gradient from their negatives.

    Args:
        cfg: solo-learn main's config; ``method_kwargs`` as in :class:`DebiasedKwargs`.
    """

    kwargs_type = DebiasedKwargs

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        kwargs = self.cfg.method_kwargs
        self.temperature: float = kwargs.temperature
        self.tau_plus: float = kwargs.tau_plus
        self.projector = projector(
            self.features_dim,
            kwargs.proj_hidden_dim,
            kwargs.proj_output_dim,
            batch_norm=kwargs.proj_batch_norm,
        )
        self._warn_of_the_floor(kwargs.proj_output_dim)

    @staticmethod
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        """Fills in the defaults and refuses what the method cannot do."""
        cfg = BaseMethod.add_and_assert_specific_cfg(cfg)
        require_two_views(cfg)
        return fill_method_kwargs(cfg, DebiasedKwargs)

    @property
    def learnable_params(self) -> list[dict[str, Any]]:
        """Adds the projector."""
        extra = {"name": "projector", "params": self.projector.parameters()}
        return [*super().learnable_params, extra]

    def forward(self, X: Tensor) -> dict[str, Any]:
        """Adds the embeddings ``z`` (N, D)."""
        out: dict[str, Any] = super().forward(X)
        return {**out, "z": self.projector(out["feats"])}

    def training_step(  # type: ignore[override]
        self, batch: Sequence[Any], batch_idx: int
    ) -> Tensor:
        """Debiased loss of the two views plus the online classifier's loss."""
        out = super().training_step(batch, batch_idx)
        z1, z2 = out["z"]
        terms = debiased_terms(z1, z2, self.temperature, self.tau_plus)
        metrics = {"train_debiased_loss": terms.loss, "train_floored": terms.floored}
        self.log_dict(metrics, on_epoch=True, sync_dist=True)
        return terms.loss + out["loss"]  # type: ignore[no-any-return]

    def _warn_of_the_floor(self, dim: int) -> None:
        # Where independent directions and a positive at cosine 0.9 already reach the floor,
        # a trained backbone will too.
        exponent = 1 / (2 * dim * self.temperature**2) - 0.9 / self.temperature
        share = math.exp(min(exponent, 0.0))
        if self.tau_plus > share:
            warnings.warn(
                f"tau_plus={self.tau_plus} is large for temperature={self.temperature}: most "
                f"anchors will sit on the floor and get no gradient from their negatives (watch "
                f"train_floored); take tau_plus below {share:.2g} or a higher temperature",
                stacklevel=2,
            )
