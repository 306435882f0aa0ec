"""Alignment and uniformity (Wang and Isola, ICML 2020, arXiv 2005.10242) as a method."""

import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core.types import PositiveFloat, PositiveInt, Section
from solo_ext.host import BaseMethod
from solo_ext.losses import alignment_loss_func, uniformity_loss_func
from solo_ext.methods.metric_criteria import PairCriterion, trains


def align_uniform_loss_func(z1: Tensor, z2: Tensor, weight: float = 0.5) -> Tensor:
    """Alignment of two views (N, D), and ``weight`` times the uniformity of both."""
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    uniformity = uniformity_loss_func(z1) + uniformity_loss_func(z2)
    return alignment_loss_func(z1, z2) + weight * uniformity


# With this the method `metric` trains the loss, too.
trains("align_uniform_loss_func")(PairCriterion)


class AlignUniformKwargs(Section):
    """``method_kwargs``: a key that is not here, or a value out of range, is refused."""

    proj_output_dim: PositiveInt = 128
    weight: PositiveFloat = 0.5


class AlignUniform(BaseMethod):
    """A linear projector and the loss."""

    kwargs_type = AlignUniformKwargs

    def __init__(self, cfg):
        super().__init__(cfg)
        self.projector = nn.Linear(self.features_dim, self.cfg.method_kwargs.proj_output_dim)

    @property
    def learnable_params(self):
        return [*super().learnable_params, {"params": self.projector.parameters()}]

    def forward(self, X):
        out = super().forward(X)
        return {**out, "z": self.projector(out["feats"])}

    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        loss = align_uniform_loss_func(*out["z"], weight=self.cfg.method_kwargs.weight)
        # `on_nonfinite` looks at their lengths.
        self.step_embeddings = [z.detach() for z in out["z"]]
        self.log("train_align_uniform_loss", loss, on_epoch=True, sync_dist=True)
        return loss + out["loss"]
