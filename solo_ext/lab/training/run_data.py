"""The data of Lightning's Trainer: loaders, and augmentation on the training device."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from solo_ext.config.schema import RunConfig
from solo_ext.data.batch_augment import BatchAugment, MixDraws, ViewDraws, ViewMixer
from solo_ext.data.dali import DALIViews
from solo_ext.data.loaders import FixedLoader, ResumableLoader
from solo_ext.data.views import RawBatch, RawBatches
from solo_ext.host.dali_loader import DALILoader


class _DrawnBatch(NamedTuple):
    """A batch with the random draws that its crops are made and mixed by.

    Attributes:
        indices: (N,).
        images: whole images (N, 3, H, W), uint8, or crops.
        targets: (N,).
        views: how to make the crops; ``None`` if they are already made.
        mixes: how to mix the crops; ``None`` without mixing.
    """

    indices: Tensor
    images: Tensor | list[Tensor]
    targets: Tensor
    views: list[ViewDraws] | None
    mixes: list[MixDraws] | None


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
            sides = views.height, views.width
            self.augment = BatchAugment(run.data.dataset, run.augmentations, *sides, run.seed)
        self.mixer = None if run.data.mix is None else ViewMixer(run.data.mix, run.seed)
        if val_loader is not None:
            # Lightning validates if this method merely exists, so set it only if needed.
            self.val_dataloader = lambda: val_loader  # type: ignore[method-assign]

    def train_dataloader(self) -> ResumableLoader | DALILoader:
        return self.loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if not self.trainer.training or (self.augment is None and self.mixer is None):
            return batch
        if isinstance(batch, RawBatch):
            epoch, asked, indices, images, targets = batch
        else:
            epoch = self.trainer.current_epoch
            indices, images, targets = batch
            asked = indices
        samples = asked.numpy()
        views = None if self.augment is None else self.augment.draw(epoch, samples)
        mixes = None
        if self.mixer is not None:
            mixes = self.mixer.draw(epoch, samples, len(images if views is None else views))
        if self.trainer.strategy.root_device.type == "cuda":
            # Copying from memory that is not pinned would wait for the device.
            views, mixes = apply_to_collection((views, mixes), Tensor, Tensor.pin_memory)
        return _DrawnBatch(indices, images, targets, views, mixes)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not isinstance(batch, _DrawnBatch):
            return batch
        crops: Any = batch.images
        if self.augment is not None and batch.views is not None:
            crops = self.augment.to(batch.indices.device)(batch.images, batch.views)
        if self.mixer is not None and batch.mixes is not None:
            crops = self.mixer(crops, batch.mixes)
        assert self.trainer is not None
        # Lightning converts crops from workers before it moves them; convert these here.
        return [batch.indices, self.trainer.precision_plugin.convert_input(crops), batch.targets]
