from typing import Any, Dict, List, Sequence

import omegaconf
import torch
import torch.nn.functional as F
from solo.losses.mocov2plus import mocov2plus_loss_func
from solo.losses.pcl import pcl_loss_func
from solo.methods.mocov2plus import MoCoV2Plus
from solo.utils.kmeans import KMeans
from solo.utils.misc import gather, omegaconf_select


class PCL(MoCoV2Plus):
    def __init__(self, cfg: omegaconf.DictConfig):
        """Implements PCL (https://arxiv.org/abs/2005.04966) on top of MoCo V2+. As in
        DeepCluster V2, the embeddings of the last epoch are clustered.

        Extra cfg settings:
            method_kwargs:
                proj_output_dim (int): number of dimensions of projected features.
                proj_hidden_dim (int): number of neurons of the hidden layers of the projector.
                temperature (float): temperature for the softmax, mean of the concentrations.
                queue_size (int): number of samples to keep in the queue.
                num_prototypes (Sequence[int]): number of prototypes of each clustering.
                alpha (float): smooths the concentrations of small clusters.
                warmup_epochs (int): number of epochs without prototypes, at least one.
                kmeans_iters (int): number of iterations for k-means clustering.
        """

        super().__init__(cfg)

        self.proj_output_dim: int = cfg.method_kwargs.proj_output_dim
        self.num_prototypes: Sequence[int] = cfg.method_kwargs.num_prototypes
        self.alpha: float = cfg.method_kwargs.alpha
        self.clustering_warmup_epochs: int = cfg.method_kwargs.warmup_epochs
        self.kmeans_iters: int = cfg.method_kwargs.kmeans_iters

        # embeddings of all samples. This is not a buffer since these are broadcast by DDP at each
        # step, and since its size is not yet known
        self.memory: Any = None

        # set by k-means
        self.prototypes: List[torch.Tensor] = []
        self.concentrations: List[torch.Tensor] = []
        self.assignments: Any = None

    @staticmethod
    def add_and_assert_specific_cfg(cfg: omegaconf.DictConfig) -> omegaconf.DictConfig:
        """Adds method specific default values/checks for config.

        Args:
            cfg (omegaconf.DictConfig): DictConfig object.

        Returns:
            omegaconf.DictConfig: same as the argument, used to avoid errors.
        """

        cfg = super(PCL, PCL).add_and_assert_specific_cfg(cfg)

        cfg.method_kwargs.num_prototypes = omegaconf_select(
            cfg,
            "method_kwargs.num_prototypes",
            [250, 500, 1000],
        )
        cfg.method_kwargs.alpha = omegaconf_select(cfg, "method_kwargs.alpha", 10)
        cfg.method_kwargs.warmup_epochs = omegaconf_select(cfg, "method_kwargs.warmup_epochs", 20)
        cfg.method_kwargs.kmeans_iters = omegaconf_select(cfg, "method_kwargs.kmeans_iters", 10)

        # there is nothing to cluster before the first epoch
        assert cfg.method_kwargs.warmup_epochs >= 1

        # samples are looked up by their indexes
        if omegaconf_select(cfg, "data.format", None) == "dali":
            assert omegaconf_select(cfg, "dali.encode_indexes_into_labels", False)

        return cfg

    def on_train_start(self):
        """Initializes the memory bank, if it does not come from a checkpoint."""

        super().on_train_start()

        # dali has the size, other dataloaders the dataset
        loader = self.trainer.train_dataloader
        dataset_size = getattr(loader, "dataset_size", None) or len(loader.dataset)

        if self.memory is None:
            # the same in all processes, as is everything that is written into it
            generator = torch.Generator().manual_seed(0)
            shape = (self.num_large_crops, dataset_size, self.proj_output_dim)
            self.memory = F.normalize(torch.randn(shape, generator=generator), dim=-1)
        self.memory = self.memory.to(self.device)
        assert self.memory.size(1) == dataset_size

    def on_train_epoch_start(self) -> None:
        """Prepares assignments, prototypes and concentrations for the next epoch."""

        if self.current_epoch >= self.clustering_warmup_epochs:
            self.cluster_memory()

    def on_save_checkpoint(self, checkpoint: Dict[str, Any]):
        """Adds the memory bank to the checkpoint.

        Args:
            checkpoint (Dict[str, Any]): checkpoint that will be saved.
        """

        checkpoint["pcl_memory"] = self.memory

    def on_load_checkpoint(self, checkpoint: Dict[str, Any]):
        """Restores the memory bank.

        Args:
            checkpoint (Dict[str, Any]): loaded checkpoint.
        """

        self.memory = checkpoint["pcl_memory"]

    @torch.no_grad()
    def cluster_memory(self):
        """Clusters the memory bank with k-means and computes the concentrations of the clusters."""

        # each process clusters a part of the samples and all parts have the same size
        world_size, dataset_size = self.trainer.world_size, self.memory.size(1)
        indexes = torch.arange(self.global_rank, dataset_size, world_size, device=self.device)
        indexes = indexes[: dataset_size // world_size]
        kmeans = KMeans(
            world_size=world_size,
            rank=self.global_rank,
            num_large_crops=self.num_large_crops,
            dataset_size=dataset_size,
            proj_features_dim=self.proj_output_dim,
            num_prototypes=self.num_prototypes,
            kmeans_iters=self.kmeans_iters,
        )
        assignments, self.prototypes = kmeans.cluster_memory(indexes, self.memory[:, indexes])
        self.assignments = assignments.to(self.device)

        # k-means goes through the crops, one for each clustering
        self.concentrations = [
            self.compute_concentration(
                self.memory[i % self.num_large_crops], self.assignments[i], prototypes
            )
            for i, prototypes in enumerate(self.prototypes)
        ]

    def compute_concentration(
        self, z: torch.Tensor, assignments: torch.Tensor, prototypes: torch.Tensor
    ) -> torch.Tensor:
        """Computes the concentration of each cluster: the mean distance of its samples to the
        prototype, divided by the logarithm of their number. As in the official code, clusters with
        less than two samples have the largest value, values are clipped to their 10th and 90th
        percentiles and rescaled to have a mean of temperature.

        Args:
            z (torch.Tensor): NxD Tensor containing the embeddings.
            assignments (torch.Tensor): cluster of each sample. Samples with -1 are ignored.
            prototypes (torch.Tensor): KxD Tensor containing the prototypes.

        Returns:
            torch.Tensor: K concentrations.
        """

        z, assignments = z[assignments != -1], assignments[assignments != -1]
        distances = (z - prototypes[assignments]).norm(dim=1)
        counts = torch.bincount(assignments, minlength=len(prototypes))
        sums = torch.zeros_like(prototypes[:, 0]).index_add(0, assignments, distances)

        concentration = sums / counts.clamp(min=1) / torch.log(counts + self.alpha)
        several = counts > 1
        if several.any():
            concentration[~several] = concentration[several].max()
        low, high = torch.quantile(concentration, concentration.new_tensor([0.1, 0.9]))
        concentration = concentration.clamp(low, high)

        # a collapsed clustering has no distances at all
        if concentration.mean() == 0:
            return torch.full_like(concentration, self.temperature)
        concentration = self.temperature * concentration / concentration.mean()
        return concentration.clamp(min=self.temperature / 100)

    def training_step(self, batch: Sequence[Any], batch_idx: int) -> torch.Tensor:
        """Training step for PCL reusing BaseMomentumMethod training step.

        Args:
            batch (Sequence[Any]): a batch of data in the
                format of [img_indexes, [X], Y], where [X] is a list of size self.num_large_crops
                containing batches of images.
            batch_idx (int): index of the batch.

        Returns:
            torch.Tensor: total loss composed of MoCo loss, ProtoNCE loss and classification loss.
        """

        idxs = batch[0]

        # skip the step of MoCo, which is repeated below
        out = super(MoCoV2Plus, self).training_step(batch, batch_idx)
        class_loss = out["loss"]
        q1, q2 = out["z"]
        k1, k2 = out["momentum_z"]

        # ------- contrastive loss -------
        # symmetric
        queue = self.queue.clone().detach()
        nce_loss = (
            mocov2plus_loss_func(q1, k2, queue[1], self.temperature)
            + mocov2plus_loss_func(q2, k1, queue[0], self.temperature)
        ) / 2
        metrics = {"train_nce_loss": nce_loss}
        loss = nce_loss + class_loss

        # ------- contrastive loss with prototypes -------
        if self.prototypes:
            clusters = (self.prototypes, self.concentrations, self.assignments[:, idxs])
            proto_nce_loss = (pcl_loss_func(q1, *clusters) + pcl_loss_func(q2, *clusters)) / 2
            metrics["train_proto_nce_loss"] = proto_nce_loss
            loss = loss + proto_nce_loss

        # ------- update queue and memory bank -------
        keys = torch.stack((gather(k1), gather(k2)))
        self._dequeue_and_enqueue(keys)
        self.memory[:, gather(idxs)] = keys.to(self.memory.dtype)

        self.log_dict(metrics, on_epoch=True, sync_dist=True)

        return loss
