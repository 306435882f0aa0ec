"""Loaders for pretraining and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from solo_ext.data.datasets import FixedViews, Images, TrainingViews
from solo_ext.data.pixels import open_pixels
from solo_ext.data.raw_batches import RawBatches
from solo_ext.data.sampler import EpochSampler
from solo_ext.data.transforms import eval_transform, pretrain_transform, statistics
from solo_ext.errors import ConfigError


class ResumableLoader(DataLoader[Any]):
    """A training loader that knows its place and can be put there again.

    Args:
        dataset: the views.
        sampler: the order.
        batch_size: per process; the last, incomplete batch is dropped.
        num_workers: worker processes; batches do not depend on it.
    """

    def __init__(
        self, dataset: TrainingViews, sampler: EpochSampler, batch_size: int, num_workers: int
    ) -> None:
        self.order = sampler
        self._served_of = sampler.epoch
        self.served = 0
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,  # type: ignore[arg-type]
            num_workers=num_workers,
            drop_last=True,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=num_workers > 0,
            # A loader without a generator of its own draws from the global one at each epoch.
            generator=torch.Generator().manual_seed(sampler.seed),
            collate_fn=getattr(dataset, "collate", None),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert self.batch_size is not None
        epoch, first = self.order.epoch, self.order.start // self.batch_size
        self._served_of, self.served = epoch, first
        for batch in super().__iter__():
            self.served += 1
            yield batch
        if self.order.epoch == epoch:
            self.order.start = 0

    def __len__(self) -> int:
        assert self.batch_size is not None
        return len(self.order) // self.batch_size

    def state_dict(self) -> dict[str, int]:
        """Place of the next batch: epoch, and batches of it already served."""
        epoch = self.order.epoch
        # The sampler may have been sent to an epoch that nothing was served of yet.
        served = self.served if epoch == self._served_of else 0
        if served >= len(self):
            return {"epoch": epoch + 1, "batches": 0}
        return {"epoch": epoch, "batches": served}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to a place that :meth:`state_dict` gave."""
        assert self.batch_size is not None
        self.order.epoch = state["epoch"]
        self.order.start = state["batches"] * self.batch_size
        self._served_of, self.served = state["epoch"], state["batches"]


def pretrain_loader(cfg: Mapping[str, Any], images: Images) -> ResumableLoader:
    """The training loader of a config.

    Batches are ``[indices, [crops], targets]``, or a :class:`RawBatch` each with
    ``data.augmentation=batch``.

    Raises:
        ConfigError: the batch is larger than the data set, or its images cannot be made a batch.
    """
    batch_size = cfg["optimizer"]["batch_size"]
    sampler = EpochSampler(len(images), cfg["seed"])
    if batch_size > len(sampler):
        raise ConfigError(
            "optimizer.batch_size",
            batch_size,
            f"the training set has {len(sampler)} images per process",
            "take a smaller batch",
        )
    data = cfg["data"]
    if data.get("augmentation") == "batch":
        pixels = open_pixels(images, data["in_memory"])
        # Taking rows of an array is less work than sending them.
        workers = 0 if pixels.held else data["num_workers"]
        return ResumableLoader(RawBatches(images, pixels), sampler, batch_size, workers)
    transform = pretrain_transform(data["dataset"], cfg["augmentations"])
    views = TrainingViews(images, transform, cfg["seed"])
    return ResumableLoader(views, sampler, batch_size, data["num_workers"])


def fixed_loader(
    cfg: Mapping[str, Any], images: Images, *, batch_size: int | None = None
) -> DataLoader[Any]:
    """Batches ``(images, targets)`` in order, each image once, at the size of pretraining."""
    first = cfg["augmentations"][0]
    transform = eval_transform(first["crop_size"], *statistics(cfg["data"]["dataset"], first))
    return DataLoader(
        FixedViews(images, transform),
        batch_size=batch_size or cfg["optimizer"]["batch_size"],
        num_workers=cfg["data"]["num_workers"],
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),
    )
