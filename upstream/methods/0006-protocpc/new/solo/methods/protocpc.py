from typing import Any, Dict, List, Sequence, Tuple

import omegaconf
import torch
import torch.nn as nn
import torch.nn.functional as F
from solo.losses.protocpc import ProtoCPCLoss
from solo.methods.base import BaseMomentumMethod
from solo.utils.misc import omegaconf_select
from solo.utils.momentum import initialize_momentum_params


class ProtoCPC(BaseMomentumMethod):
    def __init__(self, cfg: omegaconf.DictConfig):
        """Implements ProtoCPC (https://openreview.net/forum?id=8la28hZOwug).

        Extra cfg settings:
            method_kwargs:
                proj_output_dim (int): number of dimensions of the projected features.
                proj_hidden_dim (int): number of neurons in the hidden layers of the projector.
                num_prototypes (int): number of prototypes.
                student_temperature (float): temperature for the student.
                teacher_temperature (float): temperature for the teacher.
                prior_momentum (float): momentum of the prior of the prototypes.
                sk_iters (int): number of iterations for the sinkhorn-knopp algorithm.
                freeze_prototypes_epochs (int): number of epochs with frozen prototypes.
        """

        super().__init__(cfg)

        self.freeze_prototypes_epochs: int = cfg.method_kwargs.freeze_prototypes_epochs

        proj_hidden_dim: int = cfg.method_kwargs.proj_hidden_dim
        proj_output_dim: int = cfg.method_kwargs.proj_output_dim
        num_prototypes: int = cfg.method_kwargs.num_prototypes

        # projector and momentum projector
        self.projector, self.momentum_projector = [
            nn.Sequential(
                nn.Linear(self.features_dim, proj_hidden_dim),
                nn.BatchNorm1d(proj_hidden_dim),
                nn.ReLU(),
                nn.Linear(proj_hidden_dim, proj_hidden_dim),
                nn.BatchNorm1d(proj_hidden_dim),
                nn.ReLU(),
                nn.Linear(proj_hidden_dim, proj_output_dim),
            )
            for _ in range(2)
        ]
        initialize_momentum_params(self.projector, self.momentum_projector)

        # prototypes, which teacher and student share
        self.prototypes = nn.utils.weight_norm(
            nn.Linear(proj_output_dim, num_prototypes, bias=False)
        )
        self.prototypes.weight_g.data.fill_(1)  # type: ignore
        self.prototypes.weight_g.requires_grad = False

        # loss
        self.protocpc_loss_func = ProtoCPCLoss(
            num_prototypes=num_prototypes,
            student_temperature=cfg.method_kwargs.student_temperature,
            teacher_temperature=cfg.method_kwargs.teacher_temperature,
            prior_momentum=cfg.method_kwargs.prior_momentum,
            sk_iters=cfg.method_kwargs.sk_iters,
        )

    @staticmethod
    def add_and_assert_specific_cfg(cfg: omegaconf.DictConfig) -> omegaconf.DictConfig:
        """Adds method specific default values/checks for config.

        Args:
            cfg (omegaconf.DictConfig): DictConfig object.

        Returns:
            omegaconf.DictConfig: same as the argument, used to avoid errors.
        """

        cfg = super(ProtoCPC, ProtoCPC).add_and_assert_specific_cfg(cfg)

        assert not omegaconf.OmegaConf.is_missing(cfg, "method_kwargs.proj_output_dim")
        assert not omegaconf.OmegaConf.is_missing(cfg, "method_kwargs.proj_hidden_dim")

        cfg.method_kwargs.num_prototypes = omegaconf_select(
            cfg, "method_kwargs.num_prototypes", 4096
        )
        cfg.method_kwargs.student_temperature = omegaconf_select(
            cfg, "method_kwargs.student_temperature", 0.1
        )
        cfg.method_kwargs.teacher_temperature = omegaconf_select(
            cfg, "method_kwargs.teacher_temperature", 0.04
        )
        cfg.method_kwargs.prior_momentum = omegaconf_select(
            cfg, "method_kwargs.prior_momentum", 0.9
        )
        cfg.method_kwargs.sk_iters = omegaconf_select(cfg, "method_kwargs.sk_iters", 3)
        cfg.method_kwargs.freeze_prototypes_epochs = omegaconf_select(
            cfg, "method_kwargs.freeze_prototypes_epochs", 1
        )

        return cfg

    @property
    def learnable_params(self) -> List[dict]:
        """Adds projector and prototypes parameters to the parent's learnable parameters.

        Returns:
            List[dict]: list of learnable parameters.
        """

        extra_learnable_params = [
            {"name": "projector", "params": self.projector.parameters()},
            {"name": "prototypes", "params": self.prototypes.parameters()},
        ]
        return super().learnable_params + extra_learnable_params

    @property
    def momentum_pairs(self) -> List[Tuple[Any, Any]]:
        """Adds (projector, momentum_projector) to the parent's momentum pairs.

        Returns:
            List[Tuple[Any, Any]]: list of momentum pairs.
        """

        extra_momentum_pairs = [(self.projector, self.momentum_projector)]
        return super().momentum_pairs + extra_momentum_pairs

    def _project(self, out: Dict[str, Any]) -> Dict[str, Any]:
        z = F.normalize(self.projector(out["feats"]), dim=-1)
        out.update({"z": z, "p": self.prototypes(z)})
        return out

    def forward(self, X: torch.Tensor) -> Dict[str, Any]:
        """Performs the forward pass of the backbone, the projector and the prototypes.

        Args:
            X (torch.Tensor): a batch of images in the tensor format.

        Returns:
            Dict[str, Any]:
                a dict containing the outputs of the parent,
                the projected features and the logits.
        """

        return self._project(super().forward(X))

    def multicrop_forward(self, X: torch.Tensor) -> Dict[str, Any]:
        """Performs the forward pass of the backbone, the projector and the prototypes for the
        multicrop views.

        Args:
            X (torch.Tensor): a batch of images in the tensor format.

        Returns:
            Dict[str, Any]:
                a dict containing the outputs of the parent,
                the projected features and the logits.
        """

        return self._project(super().multicrop_forward(X))

    @torch.no_grad()
    def momentum_forward(self, X: torch.Tensor) -> Dict:
        """Performs the forward pass of the momentum backbone and projector, and the prototypes.

        Args:
            X (torch.Tensor): batch of images in tensor format.

        Returns:
            Dict[str, Any]:
                a dict containing the outputs of the parent,
                the projected features and the logits.
        """

        out = super().momentum_forward(X)
        z = F.normalize(self.momentum_projector(out["feats"]), dim=-1)
        out.update({"z": z, "p": self.prototypes(z)})
        return out

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> torch.Tensor:
        """Training step for ProtoCPC reusing BaseMomentumMethod training step.

        Args:
            batch (Sequence[Any]): a batch of data in the format of [img_indexes, [X], Y], where
                [X] is a list of size num_crops containing batches of images.
            batch_idx (int): index of the batch.

        Returns:
            torch.Tensor: total loss composed of ProtoCPC loss and classification loss.
        """

        out = super().training_step(batch, batch_idx)
        class_loss = out["loss"]

        # ------- protocpc loss -------
        protocpc_loss = self.protocpc_loss_func(out["p"], out["momentum_p"])

        self.log("train_protocpc_loss", protocpc_loss, on_epoch=True, sync_dist=True)

        return protocpc_loss + class_loss

    def on_after_backward(self):
        """Zeroes the gradients of the prototypes."""
        if self.current_epoch < self.freeze_prototypes_epochs:
            for p in self.prototypes.parameters():
                p.grad = None
