"""Data sets of a config as map-style data sets of PIL images and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision import datasets

from solo_ext.data.file_list import FileList
from solo_ext.data.sampler import SampleKey, mix
from solo_ext.data.transforms import MultiCrop, Transform
from solo_ext.errors import ConfigError

Split = Literal["train", "val"]
Item = tuple[Image.Image, int]


class Images(Protocol):
    """A sized, indexable collection of (image, target)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...


class Unlabelled(Dataset[Item]):
    """Every image of one folder, in the order of its names, with target -1."""

    def __init__(self, root: Path) -> None:
        known = datasets.folder.IMG_EXTENSIONS
        self.files = sorted(p for p in root.iterdir() if p.suffix.lower() in known)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item:
        return datasets.folder.default_loader(str(self.files[index])), -1


class TrainingViews(Dataset[tuple[int, list[Tensor], int]]):
    """``(index, crops, target)``, crops drawn from (seed, epoch, index) alone.

    Args:
        images: the images.
        transform: gives the crops.
        seed: seed of the run.
    """

    def __init__(self, images: Images, transform: MultiCrop, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: SampleKey) -> tuple[int, list[Tensor], int]:
        epoch, index = key
        image, target = self.images[index]
        # The generator of the process is put back: with no workers it is the trainer's own.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix(self.seed, epoch, index))
            return index, self.transform(image), target


class FixedViews(Dataset[tuple[Tensor, int]]):
    """``(view, target)`` under a transform without chance.

    Args:
        images: the images.
        transform: of one image.
    """

    def __init__(self, images: Images, transform: Transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, target = self.images[index]
        return self.transform(image), target


def open_images(data: Mapping[str, Any], split: Split) -> Images:
    """Opens the images of one split.

    Args:
        data: the section ``data`` of a config.
        split: ``train`` honours ``data.fraction`` and ``data.no_labels``.

    Raises:
        ConfigError: the path is missing, empty, or not of the layout that the data set has, or
            the fraction cannot hold every class.
    """
    key = f"data.{split}_path"
    path = data.get(f"{split}_path")
    if path is None:
        raise ConfigError(key, None, "no path", "give the folder of the images")
    if data["format"] not in ("image_folder", "dali"):
        raise ConfigError(
            "data.format",
            data["format"],
            "this command reads image files and torchvision's data sets",
            "use image_folder or dali, or solo-learn's own main_pretrain.py for h5",
        )
    root = Path(path).expanduser()
    if not root.exists():
        raise ConfigError(key, str(path), "no such folder", "give the folder of the images")
    name = data["dataset"]
    if name in ("cifar10", "cifar100", "stl10"):
        images = _torchvision(name, root, split, key)
    elif root.is_file():
        images = cast(Images, FileList(root, key, not (data.get("no_labels") and split == "train")))
    elif data.get("no_labels") and split == "train":
        images = cast(Images, Unlabelled(root))
    else:
        images = _class_folder(root, key)
    if len(images) == 0:
        raise ConfigError(key, str(path), "no image in it", "give a folder with images")
    fraction = data.get("fraction", -1)
    if split == "train" and 0 < fraction < 1:
        return cast(Images, Subset(cast(Dataset[Any], images), _stratified(images, fraction)))
    return images


def class_names(images: Images) -> list[str]:
    """Names of the classes in the order of their targets, as far as the data set knows them."""
    source: Any = images.dataset if isinstance(images, Subset) else images
    names = getattr(source, "classes", None)
    return [str(n) for n in names] if names else [str(t) for t in sorted(set(targets_of(images)))]


def targets_of(images: Images) -> Sequence[int]:
    """Targets of all samples, without decoding an image."""
    if isinstance(images, Subset):
        all_targets = targets_of(cast(Images, images.dataset))
        return [all_targets[i] for i in images.indices]
    if isinstance(images, Unlabelled):
        return [-1] * len(images)
    for name in ("targets", "labels"):
        if hasattr(images, name):
            return [int(t) for t in getattr(images, name)]
    return [images[i][1] for i in range(len(cast(Sized, images)))]


def _class_folder(root: Path, key: str) -> Images:
    classes = [p for p in root.iterdir() if p.is_dir()]
    if not classes:
        raise ConfigError(
            key,
            str(root),
            "no class folders in it",
            "lay the images out as <class>/<image>, or set data.no_labels=true for training",
        )
    try:
        return cast(Images, datasets.ImageFolder(str(root)))
    except FileNotFoundError as error:
        raise ConfigError(
            key, str(root), str(error).splitlines()[0], "remove it or fill it"
        ) from None


def _torchvision(name: str, root: Path, split: Split, key: str) -> Images:
    try:
        if name == "stl10":
            part = "train+unlabeled" if split == "train" else "test"
            return cast(Images, datasets.STL10(str(root), split=part))
        made = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        return cast(Images, made(str(root), train=split == "train"))
    except RuntimeError as error:
        raise ConfigError(
            key,
            str(root),
            f"torchvision's {name} is not there: {str(error).splitlines()[0]}",
            f"download it with torchvision.datasets.{name.upper()}(path, download=True), or use "
            "class folders with data.dataset=custom",
        ) from None


def _stratified(images: Images, fraction: float) -> list[int]:
    """Indices of a fixed, class-balanced part; the same for every seed of a run."""
    from sklearn.model_selection import train_test_split

    targets = targets_of(images)
    try:
        kept, _ = train_test_split(
            range(len(targets)), train_size=fraction, stratify=targets, random_state=42
        )
    except ValueError as error:
        raise ConfigError(
            "data.fraction",
            fraction,
            f"of {len(targets)} images this leaves classes out: {str(error).splitlines()[0]}",
            "take a fraction that keeps, and leaves, an image of every class; -1 takes all",
        ) from None
    return sorted(kept)
