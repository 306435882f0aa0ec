"""The data of Lightning's Trainer: loaders, and augmentation on the training device."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from solo_ext.config.schema import RunConfig
from solo_ext.data.batch_augment import BatchAugment, ViewDraws
from solo_ext.data.dali import DALIViews
from solo_ext.data.loaders import FixedLoader, ResumableLoader
from solo_ext.data.raw_batches import RawBatch, RawBatches
from solo_ext.host.dali_loader import DALILoader


class _DrawnBatch(NamedTuple):
    """Whole images (N, 3, H, W), uint8, with the random draws that their crops are made by."""

    indices: Tensor
    images: Tensor
    targets: Tensor
    views: list[ViewDraws]


class RunData(pl.LightningDataModule):
    """Gives methods batches ``[indices, [crops], targets]``, wherever the crops are made.

    Random numbers are drawn on the CPU before a batch is moved to the device, and the crops are
    computed afterwards, so that no step waits for the device.
    """

    def __init__(
        self,
        run: RunConfig,
        loader: ResumableLoader | DALILoader,
        val_loader: FixedLoader | DALIViews | None,
    ) -> None:
        super().__init__()
        self.loader, views = loader, loader.dataset
        self.augment: BatchAugment | None = None
        if isinstance(views, RawBatches):
            sides = views.pixels.height, views.pixels.width
            self.augment = BatchAugment(run.data.dataset, run.augmentations, *sides, run.seed)
        if val_loader is not None:
            # Lightning validates if this method merely exists, so set it only if needed.
            self.val_dataloader = lambda: val_loader  # type: ignore[method-assign]

    def train_dataloader(self) -> ResumableLoader | DALILoader:
        return self.loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.augment is None or not isinstance(batch, RawBatch):
            return batch
        assert self.trainer is not None
        views = self.augment.draw(batch.epoch, batch.asked.numpy())
        if self.trainer.strategy.root_device.type == "cuda":
            # Copying from memory that is not pinned would wait for the device.
            views = apply_to_collection(views, Tensor, Tensor.pin_memory)
        return _DrawnBatch(batch.indices, batch.images, batch.targets, views)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.augment is None or not isinstance(batch, _DrawnBatch):
            return batch
        assert self.trainer is not None
        crops = self.augment.to(batch.indices.device)(batch.images, batch.views)
        # Lightning converts crops from workers before it moves them; convert these here.
        return [batch.indices, self.trainer.precision_plugin.convert_input(crops), batch.targets]
