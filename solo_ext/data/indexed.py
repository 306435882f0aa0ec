"""A pass over a training set with the evaluation transform and with sample indices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from solo_ext.config.schema import CommonConfig
from solo_ext.core.errors import ConfigError
from solo_ext.data.dali import DALIViews
from solo_ext.data.images import files_of, open_images
from solo_ext.data.reading import read_sample, targets_of
from solo_ext.data.transforms import MultiCrop, Transform, eval_transform, fixed_view
from solo_ext.data.views import TrainingViews
from solo_ext.data.workers import WorkerLoader


def training_set(trainer: Any, cfg: CommonConfig) -> Any:
    """The training set that the indices in a trainer's batches refer to.

    The trainer has started to fit. solo-learn's DALI loader has no data set, so its images are
    opened from the config.

    Raises:
        ConfigError: the data set cannot be read with another transform.
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
    return TrainingViews(open_images(data, "train"), MultiCrop([], []), 0)


class IndexedViews(Dataset[tuple[int, Tensor]]):
    """``(index, view)`` of every sample of a training set.

    Args:
        dataset: the training set of ``solo-ext pretrain`` or of solo-learn's own script.
        transform: of one image, without randomness; it replaces the data set's own.

    >>> from PIL import Image
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 4
    >>> views = IndexedViews(TrainingViews(images, MultiCrop([], []), 0), ToTensor())
    >>> index, view = views[2]
    >>> index, view.shape
    (2, torch.Size([3, 8, 8]))
    """

    def __init__(self, dataset: Any, transform: Transform) -> None:
        self.transform = transform
        self._indexed = not isinstance(dataset, TrainingViews)
        if not self._indexed:
            self.images: Any = dataset.images
        else:
            # solo-learn's data sets are torchvision's with the index as first item.
            self.images = copy.copy(dataset)
            self.images.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        if self._indexed:
            # solo-learn's samples end in (view, target).
            return index, self.images[index][-2]
        # As in training, the next readable sample replaces an unreadable one. It is returned under
        # the requested index, so that a table by index has a row for every sample.
        _, (image, _) = read_sample(self.images, index)
        return index, self.transform(image)


def indexed_eval_loader(
    cfg: CommonConfig, dataset: Any, indices: Sequence[int], batch_size: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """Batches ``(indices, views)`` of some samples at the size of pretraining, each once.

    They come through DALI if the training batches do. ``dataset`` is a :func:`training_set`.
    """
    if cfg.data.format == "dali":
        files = files_of(dataset.images)
        views = DALIViews(cfg, [files[i] for i in indices], indices, batch_size)
        return ((numbers, images) for images, numbers in views)
    size, normal = fixed_view(cfg)
    return WorkerLoader(
        Subset(IndexedViews(dataset, eval_transform(size, *normal)), indices),
        batch_size=batch_size,
        num_workers=cfg.data.num_workers,
        start_method=cfg.data.start_method,
        # A loader without its own generator draws from the global one.
        generator=torch.Generator(),
    )


def labels_of(dataset: Any) -> Tensor | None:
    """Labels of a :func:`training_set` by sample index; ``None`` if it has none.

    >>> labels_of(TrainingViews([("an image", 2), ("another", 0)], MultiCrop([], []), 0))
    tensor([2, 0])
    """
    if isinstance(dataset, TrainingViews):
        found: Sequence[int] | None = targets_of(dataset.images)
    elif hasattr(dataset, "samples"):
        # Read `samples` before `targets`: solo-learn applies `data.fraction` to `samples` only.
        found = [label for _, label in dataset.samples]
    else:
        found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if found is None:
        return None
    labels = torch.as_tensor(found)
    return None if (labels < 0).any() else labels
