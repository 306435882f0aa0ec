from typing import Any, Sequence

import omegaconf
import torch
import torch.nn.functional as F
from solo.losses.seed import seed_loss_func
from solo.methods.distillation import DistillationMethod
from solo.utils.misc import gather, omegaconf_select


class SEED(DistillationMethod):
    def __init__(self, cfg: omegaconf.DictConfig):
        """Implements SEED (https://arxiv.org/abs/2101.04731).

        Extra cfg settings:
            method_kwargs:
                teacher_dir (str): folder of a pretrained model, with its args.json and checkpoint.
                proj_hidden_dim (int): number of neurons of the hidden layer of the projector.
                proj_output_dim (int): number of dimensions of the teacher's projected features.
                queue_size (int): number of samples to keep in the queue.
                student_temperature (float): temperature of the softmax for the student.
                teacher_temperature (float): temperature of the softmax for the teacher.
        """

        super().__init__(cfg)

        self.queue_size: int = cfg.method_kwargs.queue_size
        self.student_temperature: float = cfg.method_kwargs.student_temperature
        self.teacher_temperature: float = cfg.method_kwargs.teacher_temperature

        # queue
        queue = torch.randn(self.queue_size, cfg.method_kwargs.proj_output_dim)
        self.register_buffer("queue", F.normalize(queue, dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @staticmethod
    def add_and_assert_specific_cfg(cfg: omegaconf.DictConfig) -> omegaconf.DictConfig:
        """Adds method specific default values/checks for config.

        Args:
            cfg (omegaconf.DictConfig): DictConfig object.

        Returns:
            omegaconf.DictConfig: same as the argument, used to avoid errors.
        """

        cfg = super(SEED, SEED).add_and_assert_specific_cfg(cfg)

        cfg.method_kwargs.queue_size = omegaconf_select(cfg, "method_kwargs.queue_size", 65536)
        cfg.method_kwargs.student_temperature = omegaconf_select(
            cfg, "method_kwargs.student_temperature", 0.2
        )
        cfg.method_kwargs.teacher_temperature = omegaconf_select(
            cfg, "method_kwargs.teacher_temperature", 0.01
        )

        return cfg

    @torch.no_grad()
    def dequeue_and_enqueue(self, z: torch.Tensor):
        """Adds new samples and removes old samples from the queue in a fifo manner.

        Args:
            z (torch.Tensor): batch of features of the teacher.
        """

        z = gather(z)

        batch_size = z.shape[0]

        ptr = int(self.queue_ptr)  # type: ignore
        assert self.queue_size % batch_size == 0

        self.queue[ptr : ptr + batch_size, :] = z
        ptr = (ptr + batch_size) % self.queue_size

        self.queue_ptr[0] = ptr  # type: ignore

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> torch.Tensor:
        """Training step for SEED reusing BaseMethod training step.

        Args:
            batch (Sequence[Any]): a batch of data in the format of [img_indexes, [X], Y], where
                [X] is a list of size num_crops containing batches of images.
            batch_idx (int): index of the batch.

        Returns:
            torch.Tensor: total loss composed of SEED loss and classification loss.
        """

        out = super().training_step(batch, batch_idx)
        class_loss = out["loss"]
        students = out["z"]
        teachers = [self.teacher_forward(x) for x in batch[1][: self.num_large_crops]]

        # ------- distillation loss -------
        # student and teacher see the same view
        queue = self.queue.clone().detach()
        seed_loss = 0
        for student, teacher in zip(students, teachers):
            seed_loss += seed_loss_func(
                student, teacher, queue, self.student_temperature, self.teacher_temperature
            )
        seed_loss = seed_loss / self.num_large_crops

        self.log("train_seed_loss", seed_loss, on_epoch=True, sync_dist=True)

        # dequeue and enqueue, one view of each image
        self.dequeue_and_enqueue(teachers[0])

        return seed_loss + class_loss
