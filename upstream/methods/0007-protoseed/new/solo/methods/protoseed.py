from typing import Any, Dict, List, Sequence

import omegaconf
import torch
import torch.nn as nn
from solo.losses.protocpc import ProtoCPCLoss
from solo.methods.distillation import DistillationMethod
from solo.utils.misc import omegaconf_select


class ProtoSEED(DistillationMethod):
    def __init__(self, cfg: omegaconf.DictConfig):
        """Implements ProtoSEED (https://openreview.net/forum?id=8la28hZOwug).

        Extra cfg settings:
            method_kwargs:
                teacher_dir (str): folder of a pretrained model, with its args.json and checkpoint.
                proj_hidden_dim (int): number of neurons of the hidden layer of the projector.
                proj_output_dim (int): number of dimensions of the teacher's projected features.
                num_prototypes (int): number of prototypes.
                student_temperature (float): temperature for the student.
                teacher_temperature (float): temperature for the teacher.
                prior_momentum (float): momentum of the prior of the prototypes.
                sk_iters (int): number of iterations for the sinkhorn-knopp algorithm.
        """

        super().__init__(cfg)

        proj_output_dim: int = cfg.method_kwargs.proj_output_dim
        num_prototypes: int = cfg.method_kwargs.num_prototypes

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

        cfg = super(ProtoSEED, ProtoSEED).add_and_assert_specific_cfg(cfg)

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

        return cfg

    @property
    def learnable_params(self) -> List[dict]:
        """Adds prototypes parameters to the parent's learnable parameters.

        Returns:
            List[dict]: list of learnable parameters.
        """

        extra_learnable_params = [{"name": "prototypes", "params": self.prototypes.parameters()}]
        return super().learnable_params + extra_learnable_params

    def forward(self, X: torch.Tensor) -> Dict[str, Any]:
        """Performs the forward pass of the backbone, the projector and the prototypes.

        Args:
            X (torch.Tensor): a batch of images in the tensor format.

        Returns:
            Dict[str, Any]:
                a dict containing the outputs of the parent,
                the projected features and the logits.
        """

        out = super().forward(X)
        out.update({"p": self.prototypes(out["z"])})
        return out

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> torch.Tensor:
        """Training step for ProtoSEED reusing BaseMethod training step.

        Args:
            batch (Sequence[Any]): a batch of data in the format of [img_indexes, [X], Y], where
                [X] is a list of size num_crops containing batches of images.
            batch_idx (int): index of the batch.

        Returns:
            torch.Tensor: total loss composed of ProtoCPC loss and classification loss.
        """

        out = super().training_step(batch, batch_idx)
        class_loss = out["loss"]
        with torch.no_grad():
            views = batch[1][: self.num_large_crops]
            teacher_p = [self.prototypes(self.teacher_forward(x)) for x in views]

        # ------- protocpc loss -------
        # student and teacher see the same view
        protocpc_loss = self.protocpc_loss_func(out["p"], teacher_p, same_view=True)

        self.log("train_protocpc_loss", protocpc_loss, on_epoch=True, sync_dist=True)

        return protocpc_loss + class_loss
