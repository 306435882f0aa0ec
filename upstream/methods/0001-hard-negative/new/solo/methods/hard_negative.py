from typing import Any, Sequence

import omegaconf
import torch
from solo.losses.hard_negative import hard_negative_loss_func
from solo.methods.simclr import SimCLR
from solo.utils.misc import omegaconf_select


class HardNegative(SimCLR):
    def __init__(self, cfg: omegaconf.DictConfig):
        """Implements contrastive learning with hard negatives (https://arxiv.org/abs/2010.04592),
        which is debiased contrastive learning (https://arxiv.org/abs/2007.00224) if beta is 0.

        Extra cfg settings:
            method_kwargs:
                proj_output_dim (int): number of dimensions of the projected features.
                proj_hidden_dim (int): number of neurons in the hidden layers of the projector.
                temperature (float): temperature for the softmax in the contrastive loss.
                tau_plus (float): probability that a negative is of the same class as the anchor.
                beta (float): how much more similar negatives weigh more.
        """

        super().__init__(cfg)

        self.tau_plus: float = cfg.method_kwargs.tau_plus
        self.beta: float = cfg.method_kwargs.beta

    @staticmethod
    def add_and_assert_specific_cfg(cfg: omegaconf.DictConfig) -> omegaconf.DictConfig:
        """Adds method specific default values/checks for config.

        Args:
            cfg (omegaconf.DictConfig): DictConfig object.

        Returns:
            omegaconf.DictConfig: same as the argument, used to avoid errors.
        """

        cfg = super(HardNegative, HardNegative).add_and_assert_specific_cfg(cfg)

        cfg.method_kwargs.temperature = omegaconf_select(cfg, "method_kwargs.temperature", 0.5)
        cfg.method_kwargs.tau_plus = omegaconf_select(cfg, "method_kwargs.tau_plus", 0.1)
        cfg.method_kwargs.beta = omegaconf_select(cfg, "method_kwargs.beta", 1.0)

        assert 0 <= cfg.method_kwargs.tau_plus < 1
        assert cfg.method_kwargs.beta >= 0

        return cfg

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> torch.Tensor:
        """Training step for hard negatives reusing BaseMethod training step.

        Args:
            batch (Sequence[Any]): a batch of data in the format of [img_indexes, [X], Y], where
                [X] is a list of size num_crops containing batches of images.
            batch_idx (int): index of the batch.

        Returns:
            torch.Tensor: total loss composed of the contrastive loss and classification loss.
        """

        # skip SimCLR's own loss
        out = super(SimCLR, self).training_step(batch, batch_idx)
        class_loss = out["loss"]
        z1, z2 = out["z"]

        # ------- contrastive loss -------
        nce_loss = hard_negative_loss_func(
            z1,
            z2,
            temperature=self.temperature,
            tau_plus=self.tau_plus,
            beta=self.beta,
        )

        self.log("train_nce_loss", nce_loss, on_epoch=True, sync_dist=True)

        return nce_loss + class_loss
