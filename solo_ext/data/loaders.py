"""Loaders for pretraining (these know their position in the run), evaluation and the E-step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from solo_ext.config.schema import CommonConfig, RunConfig, Streaming
from solo_ext.core.errors import ConfigError
from solo_ext.data.dali import DALIViews
from solo_ext.data.folders import ImageFiles
from solo_ext.data.images import files_of, open_images
from solo_ext.data.reading import (
    Images,
    SkipUnreadable,
    max_consecutive_unreadable,
    read_sample,
    targets_of,
    too_many,
    unwrap_dataset,
)
from solo_ext.data.transforms import (
    FixedView,
    Statistics,
    Transform,
    eval_transform,
    fixed_view,
    pretrain_transform,
)
from solo_ext.data.views import (
    EpochSampler,
    FixedViews,
    HeldBatches,
    RawBatch,
    TrainingViews,
    raw_batches,
    shard_starts,
)
from solo_ext.data.workers import WorkerLoader


class StatefulLoader:
    """Mixin for loaders that know their position in the run and can return to it.

    >>> class Numbers(StatefulLoader):
    ...     def __iter__(self): yield from self.counted(range(len(self)))
    >>> loader = Numbers()
    >>> loader.start_at(EpochSampler(6, seed=5), batch_size=2)
    >>> loader.load_state_dict({"epoch": 0, "batches": 1})
    >>> next(iter(loader)), loader.state_dict()
    (0, {'epoch': 0, 'batches': 2})
    """

    def start_at(self, order: EpochSampler, batch_size: int) -> None:
        """Starts at the position of ``order``; constructors call this."""
        self.order, self._per_batch = order, batch_size
        self._served_of, self.served = order.epoch, 0

    def __len__(self) -> int:
        return len(self.order) // self._per_batch

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the remaining batches of the epoch, and counts them."""
        epoch, first = self.order.epoch, self.order.start // self._per_batch
        self._served_of, self.served = epoch, first
        for batch in batches:
            self.served += 1
            yield batch
        if self.order.epoch == epoch:
            self.order.start = 0

    def state_dict(self) -> dict[str, int]:
        """Position of the next batch: its epoch, and how many batches of that were served."""
        epoch = self.order.epoch
        # `set_epoch` may have moved to an epoch of which no batch was served yet.
        served = self.served if epoch == self._served_of else 0
        if served >= len(self):
            return {"epoch": epoch + 1, "batches": 0}
        return {"epoch": epoch, "batches": served}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to a position from :meth:`state_dict`."""
        self.order.epoch = state["epoch"]
        self.order.start = state["batches"] * self._per_batch
        self._served_of, self.served = state["epoch"], state["batches"]


class ResumableLoader(StatefulLoader, WorkerLoader):
    """A training loader that resumes within an epoch; an incomplete last batch is dropped.

    Attributes:
        skipped: indices of the unreadable images so far, as keys; other samples replaced them.

    >>> from PIL import Image
    >>> from solo_ext.data.transforms import MultiCrop
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 6
    >>> views = TrainingViews(images, MultiCrop([ToTensor()], [2]), seed=5)
    >>> loader = ResumableLoader(views, EpochSampler(6, seed=5), batch_size=2, num_workers=0)
    >>> indices, crops, targets = next(iter(loader))
    >>> indices.shape, [tuple(crop.shape) for crop in crops]
    (torch.Size([2]), [(2, 3, 8, 8), (2, 3, 8, 8)])
    >>> loader.state_dict()
    {'epoch': 0, 'batches': 1}
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
        self._skips = isinstance(dataset.images, SkipUnreadable)
        self.start_at(sampler, batch_size)
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,  # type: ignore[arg-type]
            num_workers=num_workers,
            drop_last=True,
            start_method=start_method,
            persistent_workers=num_workers > 0,
            collate_fn=getattr(dataset, "collate", None),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from self.counted(self._noted(super().__iter__()))

    def _noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        asked = iter(self.order)
        for batch in batches:
            if self._skips:
                served = batch.indices if isinstance(batch, RawBatch) else batch[0]
                for key, index in zip(
                    itertools.islice(asked, len(served)), served.tolist(), strict=True
                ):
                    if index != key.sample:
                        self.skipped[key.sample] = None
            yield batch


class HeldLoader(StatefulLoader):
    """A training loader of images in memory, which takes no workers; otherwise as the above.

    Attributes:
        skipped: indices of the unreadable images, as keys.

    >>> held = HeldBatches([], np.zeros((6, 3, 8, 8), dtype=np.uint8), targets=[0] * 6)
    >>> loader = HeldLoader(held, EpochSampler(6, seed=5), batch_size=2)
    >>> batch = next(iter(loader))
    >>> batch.images.shape, loader.state_dict()
    (torch.Size([2, 3, 8, 8]), {'epoch': 0, 'batches': 1})
    """

    def __init__(self, dataset: HeldBatches, order: EpochSampler, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        # Lightning sets the epoch of what a loader calls its sampler.
        self.sampler = order
        self.start_at(order, batch_size)
        replaced = dataset.served != torch.arange(len(dataset.served))
        self.skipped: dict[int, None] = dict.fromkeys(replaced.nonzero().flatten().tolist())

    def __iter__(self) -> Iterator[RawBatch]:
        return self.counted(self._batches())

    def _batches(self) -> Iterator[RawBatch]:
        epoch, entries, size = self.order.epoch, self.order.entries(), self.batch_size
        # Without a GPU, torch looks for one at every call.
        pins = torch.cuda.is_available()
        for first in range(self.order.start, len(self) * size, size):
            asked = entries(np.arange(first, first + size))
            held: Iterable[Tensor] = self.dataset.read(asked)
            if pins:
                held = (x if x.is_cuda else x.pin_memory() for x in held)
            yield RawBatch(epoch, torch.from_numpy(asked), *held)


class FixedLoader(WorkerLoader):
    """Batches ``(images, targets)`` in order, each image once.

    Unreadable images of a :class:`~solo_ext.data.reading.SkipUnreadable` data set are left out: a
    batch that loses some is smaller, and one that loses all is not served. ``skipped`` has the
    indices that the last pass left out, in order.

    >>> from PIL import Image
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 5
    >>> loader = FixedLoader(FixedViews(images, ToTensor()), batch_size=2)
    >>> [tuple(views.shape) for views, targets in loader]
    [(2, 3, 8, 8), (2, 3, 8, 8), (1, 3, 8, 8)]
    """

    def __init__(
        self,
        views: FixedViews,
        batch_size: int,
        num_workers: int = 0,
        start_method: str | None = None,
    ) -> None:
        self.skipped: list[int] = []
        self._skips = isinstance(views.images, SkipUnreadable)
        super().__init__(
            views,
            batch_size=batch_size,
            num_workers=num_workers,
            start_method=start_method,
            collate_fn=_collate_readable if self._skips else None,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._skips:
            yield from super().__iter__()
            return
        images: Any = self.dataset.images  # type: ignore[attr-defined]
        self.skipped, in_a_row, indices = [], 0, itertools.count()
        most = max_consecutive_unreadable(images)
        for batch, readable in super().__iter__():
            for fine, index in zip(readable, indices):  # noqa: B905
                in_a_row = 0 if fine else in_a_row + 1
                if not fine:
                    self.skipped.append(index)
                if in_a_row >= most:
                    raise too_many(in_a_row, images, index)
            if batch is not None:
                yield batch


def _collate_readable(items: Sequence[Any]) -> tuple[Any, list[bool]]:
    """Batch of the items that are not ``None`` (``None`` if all are), and which items those are."""
    there = [item for item in items if item is not None]
    return default_collate(there) if there else None, [item is not None for item in items]


def epoch_sampler(run: RunConfig, images: Images) -> EpochSampler:
    """The order of a config's training images.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> run = check_run(compose("digits/simclr"))
    >>> len(epoch_sampler(run, open_images(run.data, "train")))
    1400
    """
    streaming = run.data.streaming or Streaming()
    shards = shard_starts(images)
    return EpochSampler(
        len(images), run.seed, shards=shards, shards_at_once=streaming.shuffle_shards
    )


def pretrain_loader(run: RunConfig, images: Images) -> ResumableLoader | HeldLoader:
    """The training loader of a config.

    Batches are ``[indices, [crops], targets]``; with ``data.augmentation=batch``, ``RawBatch``.

    Raises:
        ConfigError: images cannot form a batch.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> by_image = ["data.augmentation=image", "data.in_memory=false"]
    >>> run = check_run(compose("digits/simclr", by_image))
    >>> indices, crops, targets = next(iter(pretrain_loader(run, open_images(run.data, "train"))))
    >>> indices.shape, [tuple(crop.shape) for crop in crops]
    (torch.Size([200]), [(200, 3, 32, 32), (200, 3, 32, 32)])
    """
    sampler = epoch_sampler(run, images)
    data, batch_size = run.data, run.optimizer.batch_size
    if data.augmentation == "batch":
        raw = raw_batches(images, data.in_memory)
        if isinstance(raw, HeldBatches):
            return HeldLoader(raw, sampler, batch_size)
        return ResumableLoader(raw, sampler, batch_size, data.num_workers, data.start_method)
    transform = pretrain_transform(data.dataset, run.augmentations)
    views = TrainingViews(images, transform, run.seed)
    return ResumableLoader(views, sampler, batch_size, data.num_workers, data.start_method)


def fixed_loader(
    cfg: CommonConfig, images: Images, *, batch_size: int | None = None
) -> FixedLoader | DALIViews:
    """Batches ``(images, targets)`` in order, each image once, at the crop size of pretraining.

    Raises:
        ConfigError: with ``data.format=dali``, DALI cannot run here or read the data set.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> from solo_ext.data.images import open_images
    >>> run = check_run(compose("digits/simclr"))
    >>> images, targets = next(iter(fixed_loader(run, open_images(run.data, "val"), batch_size=8)))
    >>> images.shape, targets.shape
    (torch.Size([8, 3, 32, 32]), torch.Size([8]))
    """
    per_batch = batch_size or cfg.optimizer.batch_size
    if cfg.data.format == "dali":
        return DALIViews(cfg, files_of(images), targets_of(images), per_batch)
    size, normal = fixed_view(cfg)
    return FixedLoader(
        FixedViews(images, eval_transform(size, *normal)),
        per_batch,
        cfg.data.num_workers,
        cfg.data.start_method,
    )


@contextmanager
def eval_mode(*roots: nn.Module) -> Iterator[None]:
    """Puts modules into eval mode inside the block, then restores the mode of every submodule.

    >>> network = nn.Dropout()
    >>> with eval_mode(network):
    ...     network.training
    False
    >>> network.training
    True
    """
    # Do not end with module.train(mode): it would also switch submodules kept in eval mode.
    modes = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def training_set(trainer: Any, cfg: CommonConfig) -> Any:
    """The training set that the indices in a trainer's batches refer to.

    solo-learn's DALI loader has no data set, so its images are opened from the config.

    Raises:
        ConfigError: the data set cannot be read with another transform.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> from types import SimpleNamespace
    >>> run = check_run(compose("digits/simclr"))
    >>> loader = pretrain_loader(run, open_images(run.data, "train"))
    >>> len(training_set(SimpleNamespace(train_dataloader=loader), run))
    1400
    """
    loader = trainer.train_dataloader
    if hasattr(loader, "dataset"):
        held = loader.dataset
        if not isinstance(held, TrainingViews) and not hasattr(held, "transform"):
            raise ConfigError(
                "data",
                type(held).__name__,
                "a data set without the attribute `transform` cannot be read under another one",
                "use image folders or one of torchvision's data sets",
            )
        return held
    # solo-learn's own scripts do not read these two keys.
    unread = {"holdout": None, "unreadable": "refuse"}
    data = cfg.data.model_copy(update={"format": "dali", "dataset": "custom", **unread})
    return TrainingViews(open_images(data, "train"))


class EvalViews(Dataset[Tensor]):
    """One fixed view, made by ``transform``, of every sample of a :func:`training_set`.

    >>> from PIL import Image
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 4
    >>> EvalViews(TrainingViews(images), ToTensor())[2].shape
    torch.Size([3, 8, 8])
    """

    def __init__(self, dataset: Any, transform: Transform) -> None:
        self.dataset, self.transform = dataset, transform
        if not isinstance(dataset, TrainingViews):
            self.dataset = copy.copy(dataset)
            self.dataset.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Tensor:
        if not isinstance(self.dataset, TrainingViews):
            # solo-learn's samples end in (view, target).
            return self.dataset[index][-2]  # type: ignore[no-any-return]
        # As in training, the next readable sample stands in for an unreadable one.
        _, (image, _) = read_sample(self.dataset.images, index)
        return self.transform(image)


def eval_batches(
    cfg: CommonConfig,
    dataset: Any,
    indices: Sequence[int],
    batch_size: int,
    device: torch.device | str = "cpu",
) -> Iterable[Tensor]:
    """Batches of fixed views of some samples, in their order, at the crop size of pretraining.

    They come through DALI if the training batches do. Views of images that are held in memory are
    made on ``device``; the caller has to copy all others there.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> run = check_run(compose("digits/simclr"))
    >>> views = TrainingViews(open_images(run.data, "train"))
    >>> [tuple(x.shape) for x in eval_batches(run, views, [7, 3, 5], 2)]
    [(2, 3, 32, 32), (1, 3, 32, 32)]
    """
    if cfg.data.format == "dali":
        files = files_of(dataset.images)
        views = DALIViews(cfg, [files[i] for i in indices], indices, batch_size)
        return (images for images, _ in views)
    size, normal = fixed_view(cfg)
    if isinstance(dataset, HeldBatches):
        return _held_views(dataset, indices, batch_size, size, normal, device)
    return WorkerLoader(
        Subset(EvalViews(dataset, eval_transform(size, *normal)), indices),
        batch_size=batch_size,
        num_workers=cfg.data.num_workers,
        start_method=cfg.data.start_method,
    )


def _held_views(
    held: HeldBatches,
    indices: Sequence[int],
    batch_size: int,
    size: int,
    normal: Statistics,
    device: torch.device | str,
) -> Iterator[Tensor]:
    """Yields batches of the views of :func:`eval_transform`, normalised on ``device``."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in normal)
    geometry = FixedView(size)
    for start in range(0, len(indices), batch_size):
        _, images, _ = held.read(indices[start : start + batch_size])
        if images.shape[2:] != (size, size):
            scaled = (geometry(to_pil_image(image)) for image in images.cpu())
            images = torch.stack([pil_to_tensor(image) for image in scaled])
        if mean.is_cuda and not images.is_cuda:
            # Copying from memory that is not pinned would wait for the device.
            images = images.pin_memory()
        images = images.to(device, non_blocking=True)
        yield images.float().div_(255).sub_(mean).div_(std)


def labels_of(dataset: Any) -> Tensor | None:
    """Labels of a :func:`training_set` by sample index; ``None`` unless every sample has one.

    >>> labels_of(TrainingViews([("an image", 2), ("another", 0)]))
    tensor([2, 0])
    """
    if isinstance(dataset, TrainingViews):
        source, indices = unwrap_dataset(dataset.images, range(len(dataset)))
        # Do not copy these targets: those of many images are memory-mapped.
        whole = isinstance(source, ImageFiles) and isinstance(indices, range)
        found: Any = source.targets if whole else targets_of(dataset.images)
    elif hasattr(dataset, "samples"):
        # Read `samples` before `targets`: solo-learn applies `data.fraction` to `samples` only.
        found = [label for _, label in dataset.samples]
    else:
        found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if found is None:
        return None
    labels = torch.as_tensor(found)
    return None if labels.min() < 0 else labels
