from typing import Any, Sequence

import omegaconf
import torch
from solo.losses.mochi import mochi_loss_func
from solo.methods.mocov2plus import MoCoV2Plus
from solo.utils.misc import gather, omegaconf_select


class MoCHi(MoCoV2Plus):
    def __init__(self, cfg: omegaconf.DictConfig):
        """Implements MoCHi (https://arxiv.org/abs/2010.01028) on top of MoCo V2+.

        Extra cfg settings:
            method_kwargs:
                proj_output_dim (int): number of dimensions of projected features.
                proj_hidden_dim (int): number of neurons of the hidden layers of the projector.
                temperature (float): temperature for the softmax in the contrastive loss.
                queue_size (int): number of samples to keep in the queue.
                num_hard (int): number of negatives most similar to the query that are mixed.
                num_pair_mixes (int): number of mixtures of two of them.
                num_query_mixes (int): number of mixtures of one of them with the query.
                warmup_epochs (int): number of epochs without mixtures.
        """

        super().__init__(cfg)

        self.num_hard: int = cfg.method_kwargs.num_hard
        self.num_pair_mixes: int = cfg.method_kwargs.num_pair_mixes
        self.num_query_mixes: int = cfg.method_kwargs.num_query_mixes
        self.mixing_warmup_epochs: int = cfg.method_kwargs.warmup_epochs

    @staticmethod
    def add_and_assert_specific_cfg(cfg: omegaconf.DictConfig) -> omegaconf.DictConfig:
        """Adds method specific default values/checks for config.

        Args:
            cfg (omegaconf.DictConfig): DictConfig object.

        Returns:
            omegaconf.DictConfig: same as the argument, used to avoid errors.
        """

        cfg = super(MoCHi, MoCHi).add_and_assert_specific_cfg(cfg)

        cfg.method_kwargs.num_hard = omegaconf_select(cfg, "method_kwargs.num_hard", 1024)
        cfg.method_kwargs.num_pair_mixes = omegaconf_select(
            cfg, "method_kwargs.num_pair_mixes", 1024
        )
        cfg.method_kwargs.num_query_mixes = omegaconf_select(
            cfg, "method_kwargs.num_query_mixes", 128
        )
        cfg.method_kwargs.warmup_epochs = omegaconf_select(cfg, "method_kwargs.warmup_epochs", 10)

        assert 0 < cfg.method_kwargs.num_hard <= cfg.method_kwargs.queue_size

        return cfg

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> torch.Tensor:
        """Training step for MoCHi reusing BaseMomentumMethod training step.

        Args:
            batch (Sequence[Any]): a batch of data in the
                format of [img_indexes, [X], Y], where [X] is a list of size self.num_large_crops
                containing batches of images.
            batch_idx (int): index of the batch.

        Returns:
            torch.Tensor: total loss composed of MoCHi loss and classification loss.
        """

        # skip MoCo's own loss
        out = super(MoCoV2Plus, self).training_step(batch, batch_idx)
        class_loss = out["loss"]
        q1, q2 = out["z"]
        k1, k2 = out["momentum_z"]

        # ------- contrastive loss -------
        # symmetric, each view mines the negatives that it is compared with
        mixing = self.current_epoch >= self.mixing_warmup_epochs
        kwargs = {
            "temperature": self.temperature,
            "num_hard": self.num_hard,
            "num_pair_mixes": self.num_pair_mixes if mixing else 0,
            "num_query_mixes": self.num_query_mixes if mixing else 0,
        }
        queue = self.queue.clone().detach()
        nce_loss = (
            mochi_loss_func(q1, k2, queue[1], **kwargs)
            + mochi_loss_func(q2, k1, queue[0], **kwargs)
        ) / 2

        # ------- update queue -------
        keys = torch.stack((gather(k1), gather(k2)))
        self._dequeue_and_enqueue(keys)

        self.log("train_nce_loss", nce_loss, on_epoch=True, sync_dist=True)

        return nce_loss + class_loss
