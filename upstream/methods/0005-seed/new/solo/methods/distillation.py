import json
from pathlib import Path
from typing import Any, Dict, List

import omegaconf
import torch
import torch.nn as nn
import torch.nn.functional as F
from solo.methods.base import BaseMethod


class DistillationMethod(BaseMethod):
    def __init__(self, cfg: omegaconf.DictConfig):
        """Base class of methods that teach the features of a frozen, pretrained teacher to a
        student. Adds the teacher and the projector of the student.

        Extra cfg settings:
            method_kwargs:
                teacher_dir (str): folder of a pretrained model, with its args.json and checkpoint.
                proj_hidden_dim (int): number of neurons of the hidden layer of the projector.
                proj_output_dim (int): number of dimensions of the teacher's projected features.
        """

        super().__init__(cfg)

        proj_hidden_dim: int = cfg.method_kwargs.proj_hidden_dim
        proj_output_dim: int = cfg.method_kwargs.proj_output_dim

        # teacher
        self.teacher = self.load_teacher(cfg.method_kwargs.teacher_dir)
        assert proj_output_dim == self.teacher.cfg.method_kwargs.proj_output_dim

        # projector
        self.projector = nn.Sequential(
            nn.Linear(self.features_dim, proj_hidden_dim),
            nn.ReLU(),
            nn.Linear(proj_hidden_dim, proj_output_dim),
        )

    @staticmethod
    def add_and_assert_specific_cfg(cfg: omegaconf.DictConfig) -> omegaconf.DictConfig:
        """Adds method specific default values/checks for config.

        Args:
            cfg (omegaconf.DictConfig): DictConfig object.

        Returns:
            omegaconf.DictConfig: same as the argument, used to avoid errors.
        """

        cfg = super(DistillationMethod, DistillationMethod).add_and_assert_specific_cfg(cfg)

        assert not omegaconf.OmegaConf.is_missing(cfg, "method_kwargs.teacher_dir")
        assert not omegaconf.OmegaConf.is_missing(cfg, "method_kwargs.proj_hidden_dim")
        assert not omegaconf.OmegaConf.is_missing(cfg, "method_kwargs.proj_output_dim")

        return cfg

    @staticmethod
    def load_teacher(teacher_dir: str) -> BaseMethod:
        """Loads a pretrained model and freezes it.

        Args:
            teacher_dir (str): folder with its args.json and checkpoint. If there are more
                checkpoints, the last one is used.

        Returns:
            BaseMethod: the teacher.
        """

        # all methods, among them those that import this file
        from solo.methods import METHODS

        with open(Path(teacher_dir) / "args.json") as f:
            cfg = omegaconf.OmegaConf.create(json.load(f))
        ckpt_path = max(Path(teacher_dir).glob("*.ckpt"), key=lambda path: path.stat().st_mtime)

        teacher = METHODS[cfg.method](cfg)
        state = torch.load(ckpt_path, map_location="cpu")["state_dict"]
        # some methods add buffers, such as queues, only when they start training
        missing_keys, _ = teacher.load_state_dict(state, strict=False)
        assert not missing_keys, f"{ckpt_path} has no {missing_keys}"
        for param in teacher.parameters():
            param.requires_grad = False
        return teacher.eval()

    def train(self, mode: bool = True) -> "DistillationMethod":
        """Keeps the teacher in evaluation mode.

        Args:
            mode (bool): whether to set training mode (True) or evaluation mode (False).

        Returns:
            DistillationMethod: self.
        """

        super().train(mode)
        self.teacher.eval()
        return self

    @property
    def learnable_params(self) -> List[dict]:
        """Adds projector parameters to the parent's learnable parameters.

        Returns:
            List[dict]: list of learnable parameters.
        """

        extra_learnable_params = [{"name": "projector", "params": self.projector.parameters()}]
        return super().learnable_params + extra_learnable_params

    def forward(self, X: torch.Tensor) -> Dict[str, Any]:
        """Performs the forward pass of the backbone and the projector of the student.

        Args:
            X (torch.Tensor): a batch of images in the tensor format.

        Returns:
            Dict[str, Any]: a dict containing the outputs of the parent and the projected features.
        """

        out = super().forward(X)
        z = F.normalize(self.projector(out["feats"]), dim=-1)
        out.update({"z": z})
        return out

    @torch.no_grad()
    def teacher_forward(self, X: torch.Tensor) -> torch.Tensor:
        """Performs the forward pass of the teacher.

        Args:
            X (torch.Tensor): a batch of images in the tensor format.

        Returns:
            torch.Tensor: projected and normalized features of the teacher.
        """

        return F.normalize(self.teacher(X)["z"], dim=-1)
