"""Loaders for pretraining and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.dali_errors import device_of
from solo_ext.data.dali_views import DALIViews
from solo_ext.data.datasets import FixedViews, TrainingViews, targets_of
from solo_ext.data.files import files_of
from solo_ext.data.fixed_loader import FixedLoader
from solo_ext.data.images import Images
from solo_ext.data.pixels import open_pixels
from solo_ext.data.place import StatefulLoader
from solo_ext.data.raw_batches import RawBatch, RawBatches
from solo_ext.data.sampler import EpochSampler, SampleKey
from solo_ext.data.transforms import eval_transform, pretrain_transform, statistics
from solo_ext.data.unreadable import Skipping, passed_over
from solo_ext.data.workers import WorkerLoader


class ResumableLoader(StatefulLoader, WorkerLoader):
    """A training loader that knows its place and can be put there again.

    Attributes:
        skipped: indices of the unreadable images that other samples stood in for so far.

    Args:
        dataset: the views.
        sampler: the order.
        batch_size: per process; the last, incomplete batch is dropped.
        num_workers: worker processes; batches do not depend on it.
        start_method: of the workers; ``None`` takes Python's default.
    """

    def __init__(
        self,
        dataset: TrainingViews,
        sampler: EpochSampler,
        batch_size: int,
        num_workers: int,
        start_method: str | None = None,
    ) -> None:
        self.skipped: dict[int, None] = {}
        self._skips = isinstance(dataset.images, Skipping)
        self.start_at(sampler, batch_size)
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,  # type: ignore[arg-type]
            num_workers=num_workers,
            drop_last=True,
            start_method=start_method,
            persistent_workers=num_workers > 0,
            # A loader without a generator of its own draws from the global one at each epoch.
            generator=torch.Generator().manual_seed(sampler.seed),
            collate_fn=getattr(dataset, "collate", None),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from self.counted(self._noted(super().__iter__()))

    def _noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        asked = iter(self.order)
        for batch in batches:
            if self._skips and not isinstance(batch, UserError):
                served = batch.indices if isinstance(batch, RawBatch) else batch[0]
                self._note(islice(asked, self.batch_size), served)
            yield batch

    def _note(self, asked: Iterable[SampleKey], served: Tensor) -> None:
        """Keeps the indices that were asked for in vain."""
        for key, index in zip(asked, served.tolist(), strict=True):
            self.skipped.update(dict.fromkeys(passed_over(key.sample, index, self.order.size)))


def epoch_sampler(cfg: Mapping[str, Any], images: Images) -> EpochSampler:
    """The order of a config's training images.

    Raises:
        ConfigError: the batch is larger than the data set.
    """
    sampler = EpochSampler(len(images), cfg["seed"])
    if cfg["optimizer"]["batch_size"] > len(sampler):
        raise ConfigError(
            "optimizer.batch_size",
            cfg["optimizer"]["batch_size"],
            f"the training set has {len(sampler)} images per process",
            "take a smaller batch",
        )
    return sampler


def pretrain_loader(cfg: Mapping[str, Any], images: Images) -> ResumableLoader:
    """The training loader of a config.

    Batches are ``[indices, [crops], targets]``, or a :class:`RawBatch` each with
    ``data.augmentation=batch``.

    Raises:
        ConfigError: the batch is larger than the data set, or its images cannot be made a batch.
    """
    sampler = epoch_sampler(cfg, images)
    data = cfg["data"]
    batch_size, start_method = cfg["optimizer"]["batch_size"], data.get("start_method")
    if data.get("augmentation") == "batch":
        pixels = open_pixels(images, data["in_memory"])
        # Taking rows of an array is less work than sending them.
        workers = 0 if pixels.held else data["num_workers"]
        raw = RawBatches(images, pixels)
        return ResumableLoader(raw, sampler, batch_size, workers, start_method)
    transform = pretrain_transform(data["dataset"], cfg["augmentations"])
    views = TrainingViews(images, transform, cfg["seed"])
    return ResumableLoader(views, sampler, batch_size, data["num_workers"], start_method)


def fixed_loader(
    cfg: Mapping[str, Any], images: Images, *, batch_size: int | None = None
) -> FixedLoader | DALIViews:
    """Batches ``(images, targets)`` in order, each image once, at the size of pretraining.

    Raises:
        ConfigError: with ``data.format=dali``, DALI cannot run here or read the data set.
    """
    first = cfg["augmentations"][0]
    size, normal = first["crop_size"], statistics(cfg["data"]["dataset"], first)
    per_batch = batch_size or cfg["optimizer"]["batch_size"]
    if cfg["data"].get("format") == "dali":
        return DALIViews(
            files_of(images),
            targets_of(images),
            size,
            normal,
            batch_size=per_batch,
            num_threads=cfg["data"]["num_workers"],
            device=device_of(cfg),
        )
    return FixedLoader(
        FixedViews(images, eval_transform(size, *normal)),
        per_batch,
        cfg["data"]["num_workers"],
        cfg["data"].get("start_method"),
    )
