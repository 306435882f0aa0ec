"""The E-step's pass over the training set: one fixed view of every image, in a given order."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from solo_ext.config.schema import CommonConfig
from solo_ext.core.errors import ConfigError
from solo_ext.data.dali import DALIViews
from solo_ext.data.folders import ImageFiles
from solo_ext.data.images import files_of, open_images
from solo_ext.data.raw_batches import HeldPixels, RawBatches
from solo_ext.data.reading import read_sample, targets_of, unwrapped
from solo_ext.data.transforms import FixedView, Statistics, Transform, eval_transform, fixed_view
from solo_ext.data.views import TrainingViews
from solo_ext.data.workers import WorkerLoader


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
    # Not module.train(mode) at the end: it would also switch submodules kept in eval mode.
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

    The trainer has started to fit. solo-learn's DALI loader has no data set, so its images are
    opened from the config.

    Raises:
        ConfigError: the data set cannot be read with another transform.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> run = check_run(compose("digits/simclr"))
    >>> from types import SimpleNamespace
    >>> from solo_ext.data.loaders import pretrain_loader
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
    """One fixed view of every sample of a training set.

    Args:
        dataset: the training set of ``solo-ext pretrain`` or of solo-learn's own script.
        transform: of one image, without randomness; it replaces the data set's own.

    >>> from PIL import Image
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 4
    >>> EvalViews(TrainingViews(images), ToTensor())[2].shape
    torch.Size([3, 8, 8])
    """

    def __init__(self, dataset: Any, transform: Transform) -> None:
        self.transform = transform
        self._ours = isinstance(dataset, TrainingViews)
        self.images: Any = dataset.images if self._ours else copy.copy(dataset)
        if not self._ours:
            self.images.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        if not self._ours:
            # solo-learn's samples end in (view, target).
            return self.images[index][-2]  # type: ignore[no-any-return]
        # As in training, the next readable sample stands in for an unreadable one.
        _, (image, _) = read_sample(self.images, index)
        return self.transform(image)


def eval_batches(
    cfg: CommonConfig,
    dataset: Any,
    indices: Sequence[int],
    batch_size: int,
    device: torch.device | str = "cpu",
) -> Iterable[Tensor]:
    """Batches of fixed views of some samples, in their order, at the size of pretraining.

    They come through DALI if the training batches do, and from memory where those lie there: they
    are then made on ``device``, to which others remain to be copied. ``dataset`` is a
    :func:`training_set`.

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
    if isinstance(dataset, RawBatches) and isinstance(dataset.pixels, HeldPixels):
        return _held_views(dataset.pixels, indices, batch_size, size, normal, device)
    return WorkerLoader(
        Subset(EvalViews(dataset, eval_transform(size, *normal)), indices),
        batch_size=batch_size,
        num_workers=cfg.data.num_workers,
        start_method=cfg.data.start_method,
        # A loader without its own generator draws from the global one.
        generator=torch.Generator(),
    )


def _held_views(
    pixels: HeldPixels,
    indices: Sequence[int],
    batch_size: int,
    size: int,
    normal: Statistics,
    device: torch.device | str,
) -> Iterator[Tensor]:
    """The views of :func:`eval_transform`, a batch at a time."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in normal)
    geometry = FixedView(size)
    for start in range(0, len(indices), batch_size):
        _, images, _ = pixels.read(indices[start : start + batch_size])
        if images.shape[2:] != (size, size):
            scaled = (geometry(to_pil_image(image)) for image in images)
            images = torch.stack([pil_to_tensor(image) for image in scaled])
        if mean.is_cuda:
            # Copying from memory that is not pinned would wait for the device.
            images = images.pin_memory()
        images = images.to(device, non_blocking=True)
        yield images.float().div_(255).sub_(mean).div_(std)


def labels_of(dataset: Any) -> Tensor | None:
    """Labels of a :func:`training_set` by sample index; ``None`` if it has none.

    >>> labels_of(TrainingViews([("an image", 2), ("another", 0)]))
    tensor([2, 0])
    """
    if isinstance(dataset, TrainingViews):
        source, indices = unwrapped(dataset.images, range(len(dataset)))
        # Those of many images are mapped, and not copied.
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
