"""Opens the data set of a config, and describes it without decoding an image."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset
from torchvision import datasets

from solo_ext.config import schema
from solo_ext.core.errors import ConfigError, first_line
from solo_ext.data.folders import class_folders, file_list, unlabelled_folders
from solo_ext.data.h5 import open_h5
from solo_ext.data.huggingface import open_huggingface
from solo_ext.data.reading import Images, SkipUnreadable, file_state, targets_of, unwrap_dataset
from solo_ext.data.streaming import open_streaming
from solo_ext.data.webdataset import open_webdataset

Split = Literal["train", "val"]
TORCHVISION = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "stl10": "stl10_binary",
}
"""Folder that identifies each of torchvision's data sets."""
_CLASSES = {"cifar10": 10, "cifar100": 100, "stl10": 10}


def open_images(data: schema.Images, split: Split) -> Images:
    """Opens the images of one split of a section ``data``.

    ``train`` applies ``data.fraction``, both apply ``data.no_labels``. With ``data.holdout`` both
    splits are parts of the training images, and ``data.val_path`` is not read: a stratified part,
    or a random one of images without labels.

    Raises:
        ConfigError: the path is missing, empty, unreadable, or not in the data set's layout, or a
            fraction cannot contain every class.

    >>> from solo_ext.data.digits import digits_folder
    >>> data = schema.Images(dataset="custom", train_path=str(digits_folder("train")))
    >>> images = open_images(data, "train")
    >>> len(images), images[0][0].size, class_names(images)[:3]
    (1400, (32, 32), ['0', '1', '2'])
    """
    if data.holdout is not None:
        whole = open_images(data.model_copy(update={"holdout": None}), "train")
        return _held_out(whole, data.holdout, split)
    key = f"data.{split}_path"
    path = data.path(split)
    labelled = not data.no_labels
    # An empty path would mean the current folder.
    if not path or not all(one.strip() for one in ([path] if isinstance(path, str) else path)):
        raise ConfigError(key, path, "no path", "give the folder of the images")
    try:
        if isinstance(path, str):
            images = _opened(data, split, path, labelled=labelled)
        else:
            images = _of_several(data, key, path, labelled=labelled)
    except RuntimeError as error:
        # torchvision raises this if an archive is missing.
        raise ConfigError(
            key,
            path,
            f"torchvision's {data.dataset} is not there: {first_line(error)}",
            f"download it with torchvision.datasets.{data.dataset.upper()}(path, download=True), "
            "or use class folders with data.dataset=custom",
        ) from None
    except OSError as error:
        problem = first_line(error)
        raise ConfigError(key, path, problem, "give a folder or file that can be read") from None
    if len(images) == 0:
        raise ConfigError(key, path, "no image in it", "give a folder with images")
    if split == "train" and 0 < data.fraction < 1:
        images = part_of(images, _stratified(np.asarray(targets_of(images)), data.fraction))
    return SkipUnreadable(images) if data.unreadable == "skip" else images


def _opened(data: schema.Images, split: Split, path: str, *, labelled: bool) -> Images:
    key, name = f"data.{split}_path", data.dataset
    if data.format == "h5":
        return open_h5(path, key, name, labelled=labelled)
    if data.format == "huggingface":
        same_path = data.train_path == data.val_path
        section = data.huggingface or schema.HuggingFace()
        return open_huggingface(path, split, section, labelled=labelled, same_path=same_path)
    shards, refuse = data.streaming or schema.Streaming(), data.unreadable != "skip"
    if data.format == "streaming":
        return open_streaming(path, key, shards, labelled=labelled)
    if data.format == "webdataset":
        return open_webdataset(path, key, shards, labelled=labelled, whole=refuse)
    root = Path(path).expanduser()
    if not root.exists():
        raise ConfigError(key, path, "no such folder", "give the folder of the images")
    if root.is_file():
        # With `skip`, a listed file that does not exist counts as an unreadable image.
        return file_list(root, key, labelled, present=refuse)
    if name not in TORCHVISION or _has_class_folders(root, key, name):
        return class_folders(root, key) if labelled else unlabelled_folders([root], key)
    held: Any
    if name == "stl10":
        part = "train+unlabeled" if split == "train" else "test"
        held = datasets.STL10(str(root), split=part)
    else:
        cifar = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
        held = cifar(str(root), train=split == "train")
    if not labelled:
        held.classes = []
        setattr(held, "labels" if name == "stl10" else "targets", [-1] * len(held))
    return cast(Images, held)


def _of_several(data: schema.Images, key: str, paths: list[str], *, labelled: bool) -> Images:
    roots = [Path(path).expanduser() for path in paths]
    if labelled or data.format not in ("image_folder", "dali"):
        problem = "only image files without labels may lie in several folders"
        raise ConfigError(key, paths, problem, "name one, or set data.no_labels=true")
    for root in roots:
        if not root.is_dir():
            raise ConfigError(key, str(root), "no such folder", "give folders of images")
    return unlabelled_folders(roots, key)


def _has_class_folders(root: Path, key: str, name: str) -> bool:
    """Whether a data set that torchvision downloads was unpacked into class folders instead."""
    folders = {p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")}
    if not folders or TORCHVISION[name] in folders:
        return False
    if len(folders) != _CLASSES[name]:
        # A folder of several data sets, say: each would be taken for a class.
        raise ConfigError(
            key,
            str(root),
            f"neither torchvision's {name} is in it nor {_CLASSES[name]} class folders (it has "
            f"{len(folders)})",
            f"download it with torchvision.datasets.{name.upper()}(path, download=True), or set "
            "data.dataset=custom for other images",
        )
    return True


def _held_out(images: Images, holdout: float, split: Split) -> Images:
    """The held-out images for ``val``, all others for ``train``.

    Of labelled images it is a stratified part, of images without labels a random one. If only some
    have labels, it is a part of these.
    """
    targets = np.asarray(targets_of(images))
    labelled = np.flatnonzero(targets >= 0)
    chosen = np.zeros(len(targets), bool)
    if len(labelled):
        chosen[labelled[_stratified(targets[labelled], holdout, "data.holdout")]] = True
    else:
        count = round(holdout * len(targets))
        if not 0 < count < len(targets):
            problem = f"of {len(targets)} images this leaves none to train on, or holds none out"
            raise ConfigError("data.holdout", holdout, problem, "null holds none out")
        chosen[np.random.default_rng(42).permutation(len(targets))[:count]] = True
    return part_of(images, np.flatnonzero(chosen == (split == "val")))


def part_of(images: Images, indices: NDArray[np.int64]) -> Images:
    """A ``Subset``; of a part, it is of the same data set, and skips what the whole skips.

    >>> part_of([("a", 0), ("b", 1), ("c", 2)], np.array([2, 0]))[0]
    ('c', 2)
    """
    if isinstance(images, SkipUnreadable):
        return SkipUnreadable(part_of(images.images, indices))
    whole: Any = images
    if isinstance(images, Subset):
        whole, indices = images.dataset, np.asarray(images.indices)[indices]
    # An array takes eight bytes per image, which forked processes share, and yields plain ints.
    return cast(Images, Subset(whole, array("q", indices.tobytes())))


def _stratified(
    targets: NDArray[np.int64], fraction: float, key: str = "data.fraction"
) -> NDArray[np.int64]:
    """Indices of a stratified part, which is the same for every seed of a run."""
    from sklearn.model_selection import train_test_split

    try:
        kept, _ = train_test_split(
            np.arange(len(targets)), train_size=fraction, stratify=targets, random_state=42
        )
    except ValueError as error:
        none = "-1 takes all" if key == "data.fraction" else "null holds none out"
        raise ConfigError(
            key,
            fraction,
            f"of {len(targets)} images this leaves classes out: {first_line(error)}",
            f"take a fraction that keeps, and leaves, an image of every class; {none}",
        ) from None
    # The share of a small class may be rounded to none: take its first image.
    lost = np.setdiff1d(targets, targets[kept])
    return np.union1d(kept, [np.flatnonzero(targets == target)[0] for target in lost]).astype(int)


def class_names(images: Images) -> list[str]:
    """Names of the classes in the order of their targets; the targets if the data set has no names.

    >>> class_names([("an image", 2), ("another", 0)])
    ['0', '2']
    """
    names = getattr(unwrap_dataset(images, ())[0], "classes", None)
    return [str(n) for n in names or sorted(set(targets_of(images)))]


def files_of(images: Images) -> list[str]:
    """Path of every sample by index, for DALI, which opens the files itself.

    Raises:
        ConfigError: the data set has no image files.

    >>> from solo_ext.data.folders import ImageFiles, Listing
    >>> files_of(ImageFiles(Listing.of([("ant/0.png", 0), ("bee/0.png", 1)], ["ant", "bee"])))
    ['ant/0.png', 'bee/0.png']
    """
    source, indices = unwrap_dataset(images, range(len(images)))
    if hasattr(source, "samples"):
        paths = [str(path) for path, _ in source.samples]
        return [paths[index] for index in indices]
    raise ConfigError(
        "data.format",
        "dali",
        f"DALI reads image files, and {type(source).__name__} has none",
        "use class folders or a list of files, or data.format=image_folder",
    )


MOST_SIZES = 10_000
"""A file system answers for so many files in a fraction of a second, over a network in seconds."""


def images_fingerprint(images: Images, *, by_name: bool = False) -> str | None:
    """A digest that changes with the files of a data set, their order, and their classes.

    Files are identified by path, size and modification time, or with ``by_name`` by name alone: no
    file is then accessed, and a copy elsewhere has the same digest. Data sets that are not folders
    of files have a text attribute ``fingerprint`` instead, and may have a ``names_digest``.

    Returns:
        Hex digits; ``None`` if the images cannot be identified, or if unreadable ones are skipped
        and ``by_name`` is false.

    >>> from solo_ext.data.folders import ImageFiles, Listing
    >>> here = [ImageFiles(Listing.of([(f"{x}/0.png", 0)], ["ant"])) for x in ("a", "b")]
    >>> images_fingerprint(here[0]) == images_fingerprint(here[1])
    False
    >>> images_fingerprint(here[0], by_name=True) == images_fingerprint(here[1], by_name=True)
    True
    """
    digest = hashlib.sha256()
    source: Any = images
    while (entries := _entries(source, by_name)) is None:
        if isinstance(source, Subset):
            digest.update(repr(list(source.indices)).encode())
            source = source.dataset
        elif by_name and isinstance(source, SkipUnreadable):
            # Stored features carry digests with this word.
            digest.update(b"Skipping")
            source = source.images
        else:
            return None
    digest.update(type(source).__name__.encode())
    for entry in entries:
        # File names need not be UTF-8.
        digest.update(os.fsencode(f"{entry}\n"))
    return digest.hexdigest()


def sizes_fingerprint(images: Images) -> str | None:
    """A digest of the sizes of the files of :data:`MOST_SIZES` images at most, spread evenly.

    A copy elsewhere has the same digest, and other images under the same names hardly do.

    Returns:
        Hex digits; ``None`` if the images are no files of their own.

    >>> from solo_ext.data.folders import ImageFiles, Listing
    >>> nowhere = ImageFiles(Listing.of([("a/0.png", 0)], ["ant"]))
    >>> sizes_fingerprint(nowhere) == sizes_fingerprint([("an image", 0)])
    False
    """
    every = -(-len(images) // MOST_SIZES) or 1
    source, places = unwrap_dataset(images, range(0, len(images), every))
    if not hasattr(source, "samples"):
        return None
    digest = hashlib.sha256()
    for place in places:
        try:
            size = os.stat(source.samples[place][0]).st_size
        except OSError:
            size = -1
        digest.update(f"{size}\n".encode())
    return digest.hexdigest()


def _entries(source: Any, by_name: bool) -> Iterable[Any] | None:
    if by_name and isinstance(getattr(source, "names_digest", None), str):
        return [source.names_digest]
    if isinstance(getattr(source, "fingerprint", None), str):
        return [source.fingerprint]
    if hasattr(source, "samples"):
        # A listing in the cache folder has a digest already.
        known = getattr(source.samples, "digest", None) if by_name else None
        if known is not None:
            return [known]
        paths = (os.fspath(path) for path, _ in source.samples)
        named = _from_root(list(paths)) if by_name else map(file_state, paths)
        return zip(named, (target for _, target in source.samples), strict=True)
    if hasattr(source, "base_folder"):
        # torchvision's data sets are a few large files, and an argument selects the split.
        split = getattr(source, "split", getattr(source, "train", None))
        if by_name:
            return [source.base_folder, split, source.classes]
        files = sorted(p for p in Path(source.root, source.base_folder).rglob("*") if p.is_file())
        return [split, source.classes, *map(file_state, files)]
    return None


def _from_root(paths: list[str]) -> list[str]:
    """The paths relative to the deepest folder that contains them all."""
    split = [os.path.split(path) for path in paths]
    # Call `abspath` once per folder: there are far fewer folders than files.
    folders = {folder: os.path.abspath(folder) for folder, _ in split}
    root = len(os.path.commonpath(folders.values())) if folders else 0
    within = {folder: whole[root:].lstrip(os.sep) for folder, whole in folders.items()}
    return [os.path.join(within[folder], name) for folder, name in split]
