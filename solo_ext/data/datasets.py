"""Data sets of a config as map-style data sets of PIL images and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision import datasets

from solo_ext.core.draws import mix
from solo_ext.core.errors import ConfigError
from solo_ext.data.formats.class_folders import ClassFolders
from solo_ext.data.formats.file_list import FileList
from solo_ext.data.formats.h5 import open_h5
from solo_ext.data.formats.huggingface import open_huggingface
from solo_ext.data.images import Images, Item, Split
from solo_ext.data.reading import UnreadableImage, load_image
from solo_ext.data.sampler import SampleKey
from solo_ext.data.transforms import MultiCrop, Transform
from solo_ext.data.unreadable import Skipping, name_of, read_sample


class Unlabelled(Dataset[Item]):
    """Every image of one folder, in the order of its names, with target -1."""

    def __init__(self, root: Path) -> None:
        known = datasets.folder.IMG_EXTENSIONS
        found = (p for p in root.iterdir() if p.suffix.lower() in known)
        self.files = sorted(p for p in found if not p.is_dir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item:
        return load_image(self.files[index]), -1

    def name_of(self, index: int) -> str:
        """The path of an image."""
        return str(self.files[index])


class WithoutLabels(Dataset[Item]):
    """The images of another data set, with target -1."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.targets = [-1] * len(images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return self.images[index][0], -1

    def name_of(self, index: int) -> str:
        """As the data set calls it."""
        return name_of(self.images, index)


class TrainingViews(Dataset[tuple[int, list[Tensor], int]]):
    """``(index, crops, target)``, crops drawn from (seed, epoch, index) alone.

    Where another sample stands in for one that cannot be read, index and target are its own; the
    crops are drawn for the one that was asked for, so that they differ from its own.

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
        served, (image, target) = read_sample(self.images, index)
        # The generator of the process is put back: with no workers it is the trainer's own.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix(self.seed, epoch, index))
            return served, self.transform(image), target


class FixedViews(Dataset[tuple[Tensor, int] | None]):
    """``(view, target)`` under a transform without chance; ``None`` for an image to leave out.

    Args:
        images: the images.
        transform: of one image.
    """

    def __init__(self, images: Images, transform: Transform) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        try:
            image, target = self.images[index]
        except UnreadableImage:
            if not isinstance(self.images, Skipping):
                raise
            return None
        return self.transform(image), target


def open_images(data: Mapping[str, Any], split: Split) -> Images:
    """Opens the images of one split.

    Args:
        data: the section ``data`` of a config.
        split: ``train`` honours ``data.fraction`` and ``data.no_labels``. With ``data.holdout``
            both splits are parts of the training images, and ``data.val_path`` is not read.

    Raises:
        ConfigError: the path is missing, empty, not readable, or not of the layout that the data
            set has, or a fraction cannot hold every class.
    """
    holdout = data.get("holdout")
    if holdout is not None:
        return _held_out(open_images({**data, "holdout": None}, "train"), holdout, split)
    key = f"data.{split}_path"
    path = data.get(f"{split}_path")
    # An empty one would be the current folder.
    if path is None or not str(path).strip():
        raise ConfigError(key, path, "no path", "give the folder of the images")
    unlabelled = bool(data.get("no_labels")) and split == "train"
    try:
        images = _opened(data, split, str(path), unlabelled)
    except OSError as error:
        problem = error.strerror or str(error).splitlines()[0]
        named = f" ({error.filename})" if error.filename else ""
        raise ConfigError(
            key, path, f"{problem}{named}", "give a folder or file that can be read"
        ) from None
    if len(images) == 0:
        raise ConfigError(key, str(path), "no image in it", "give a folder with images")
    if unlabelled and not isinstance(images, Unlabelled | FileList):
        images = cast(Images, WithoutLabels(images))
    fraction = data.get("fraction", -1)
    if split == "train" and 0 < fraction < 1:
        kept = _stratified(targets_of(images), fraction)
        images = cast(Images, Subset(cast(Dataset[Any], images), kept))
    return cast(Images, Skipping(images)) if data.get("unreadable") == "skip" else images


def _opened(data: Mapping[str, Any], split: Split, path: str, unlabelled: bool) -> Images:
    key, name = f"data.{split}_path", data["dataset"]
    if data["format"] == "h5":
        return cast(Images, open_h5(path, key, name))
    if data["format"] == "huggingface":
        return cast(Images, _huggingface(data, split, path, unlabelled))
    root = Path(path).expanduser()
    if not root.exists():
        raise ConfigError(key, path, "no such folder", "give the folder of the images")
    if root.is_file():
        # One that is not there is then skipped as any other that cannot be read.
        present = data.get("unreadable") != "skip"
        return cast(Images, FileList(root, key, not unlabelled, present=present))
    if name in ("cifar10", "cifar100", "stl10"):
        return _torchvision(name, root, split, key)
    return cast(Images, Unlabelled(root) if unlabelled else ClassFolders(root, key))


def class_names(images: Images) -> list[str]:
    """Names of the classes in the order of their targets, as far as the data set knows them."""
    source: Any = images
    while isinstance(source, Skipping | Subset):
        source = source.images if isinstance(source, Skipping) else source.dataset
    names = getattr(source, "classes", None)
    return [str(n) for n in names] if names else [str(t) for t in sorted(set(targets_of(images)))]


def targets_of(images: Images) -> Sequence[int]:
    """Targets of all samples, without decoding an image."""
    if isinstance(images, Skipping):
        return targets_of(images.images)
    if isinstance(images, Subset):
        all_targets = targets_of(cast(Images, images.dataset))
        return [all_targets[i] for i in images.indices]
    if isinstance(images, Unlabelled):
        return [-1] * len(images)
    for name in ("targets", "labels"):
        if hasattr(images, name):
            return [int(t) for t in getattr(images, name)]
    return [images[i][1] for i in range(len(cast(Sized, images)))]


def _huggingface(data: Mapping[str, Any], split: Split, path: str, unlabelled: bool) -> Any:
    same_path = data.get("train_path") == data.get("val_path")
    section = data.get("huggingface") or {}
    return open_huggingface(path, split, section, labelled=not unlabelled, same_path=same_path)


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


def _held_out(images: Images, holdout: float, split: Split) -> Images:
    """The held-out labelled images, or all others."""
    if isinstance(images, Skipping):
        return cast(Images, Skipping(_held_out(images.images, holdout, split)))
    targets = targets_of(images)
    labelled = [i for i, target in enumerate(targets) if target >= 0]
    if not labelled:
        raise ConfigError(
            "data.holdout", holdout, "no training image has a label", "set it to null"
        )
    held = _stratified([targets[i] for i in labelled], holdout, "data.holdout")
    chosen = {labelled[i] for i in held}
    kept = [i for i in range(len(targets)) if (i in chosen) == (split == "val")]
    if isinstance(images, Subset):
        # Not a part of a part, which would hide what it is of.
        return cast(Images, Subset(images.dataset, [images.indices[i] for i in kept]))
    return cast(Images, Subset(cast(Dataset[Any], images), kept))


def _stratified(targets: Sequence[int], fraction: float, key: str = "data.fraction") -> list[int]:
    """Indices of a fixed, class-balanced part; the same for every seed of a run."""
    from sklearn.model_selection import train_test_split

    try:
        kept, _ = train_test_split(
            range(len(targets)), train_size=fraction, stratify=targets, random_state=42
        )
    except ValueError as error:
        none = "-1 takes all" if key == "data.fraction" else "null holds none out"
        raise ConfigError(
            key,
            fraction,
            f"of {len(targets)} images this leaves classes out: {str(error).splitlines()[0]}",
            f"take a fraction that keeps, and leaves, an image of every class; {none}",
        ) from None
    return sorted(kept)
