"""Reads an image; if it is unreadable, says why and finds the sample that replaces it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset, Subset

from solo_ext.core.errors import UserError, first_line

Item = tuple[Image.Image, int]
"""An image and its target, -1 without a label."""


class Images(Protocol):
    """A data set: a sized, indexable collection of images and targets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, whatever a file is called. PIL knows more, and for one of them it
starts a PostScript interpreter."""
NOT_THE_IMAGES_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that are not the file's fault: too many open files, or no memory left."""
MAX_CONSECUTIVE_UNREADABLE = 100
"""After this many unreadable files in a row, the disk counts as lost."""
USUAL_COLUMNS = {
    "image": ("image", "img", "jpg", "jpeg", "png"),
    "label": ("label", "labels", "target", "targets", "class", "cls"),
}
"""Usual names of columns, in order of preference."""
_TIFF_BITS_PER_SAMPLE = 258
_TIFF_PHOTOMETRIC = 262
_TIFF_WHITE_IS_ZERO = 0
_TIFF_SAMPLE_FORMAT = 339
_TIFF_SIGNED = 2


class _OneLineError(UserError):
    """An error of one line, also after ``DataLoader`` rebuilt it from a worker's traceback."""

    def __init__(self, message: str) -> None:
        name = type(self).__name__
        if message.startswith(f"Caught {name} in "):
            # The last line of a traceback is `<module>.<type>: <message>`.
            message = message.strip().splitlines()[-1].partition(f"{name}: ")[2]
        super().__init__(message)


class UnreadableImage(_OneLineError):
    """An unreadable image: its name ``what`` and the ``reason``, or only a message ``what``.

    >>> str(UnreadableImage("a.png", "it is empty"))[:44]
    "image 'a.png' cannot be read: it is empty; m"
    """

    span = 1
    """Distance in samples to the replacement; for a sample of a lost shard, the shard's size."""

    def __init__(self, what: str, reason: str | None = None) -> None:
        if reason is not None:
            self.what, self.reason = what, " ".join(reason.split())
            what = (
                f"image {what!r} cannot be read: {self.reason}; mend or remove it, or leave out "
                "what cannot be read with data.unreadable=skip"
            )
        super().__init__(what)


class StorageUnavailable(_OneLineError):
    """The storage of the images does not respond; like a lost disk, this always ends the run.

    >>> str(StorageUnavailable("s3://images: no answer"))
    's3://images: no answer'
    """

    exit_code = 1


@contextlib.contextmanager
def image_errors(name: Callable[[], str]) -> Iterator[None]:
    """Turns errors of reading an image into an ``UnreadableImage`` with the image's name.

    Raises:
        UnreadableImage: any error, except a ``UserError`` and a lack of memory or file handles.

    >>> with image_errors(lambda: "a.png"):
    ...     raise ValueError("it is a link")
    Traceback (most recent call last):
    solo_ext.data.reading.UnreadableImage: image 'a.png' cannot be read: it is a link; mend or ...
    """
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:
        # Damaged files make PIL and h5py raise errors of nearly every type.
        if isinstance(error, OSError) and error.errno in NOT_THE_IMAGES_FAULT:
            raise
        raise UnreadableImage(name(), _reason(error)) from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if isinstance(error, FileNotFoundError):
        dangling = os.path.islink(error.filename or "")
        return "it is a link to a file that is not there" if dangling else "it is not there"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of an image file.

    Raises:
        UnreadableImage: the file is missing, not permitted, or not a regular file.

    >>> read_file("nothing.png")
    Traceback (most recent call last):
    solo_ext.data.reading.UnreadableImage: image 'nothing.png' cannot be read: it is not there...
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer forever.
    flag = getattr(os, "O_NONBLOCK", 0)
    # Without `Path`, `open` would take a number as one of this process's file descriptors.
    with (
        image_errors(lambda: str(path)),
        open(Path(path), "rb", opener=lambda name, flags: os.open(name, flags | flag)) as file,
    ):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file")
        return file.read()


def decode_image(encoded: bytes, name: Callable[[], str]) -> Image.Image:
    """Decodes an image file that is held in memory as RGB; ``name`` is called for an error.

    Raises:
        UnreadableImage: ``encoded`` is empty, truncated, no image, or too large.

    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 3), 128).save(file, "PNG")
    >>> image = decode_image(file.getvalue(), lambda: "a.png")
    >>> image.mode, image.size
    ('RGB', (4, 3))
    """
    with image_errors(name):
        if not isinstance(encoded, bytes):
            raise ValueError("it is neither a path nor an encoded image")
        if not encoded:
            raise EOFError("it is empty")
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            return _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Decodes an opened image to 8-bit RGB.

    Grey levels of up to 16 bits are scaled to 8; PIL's own conversion would clip them at 255.
    Transparency is dropped, and the colours of transparent pixels stay. A rotation that only EXIF
    states is not applied.
    """
    # A TIFF states its bits; other images of more than 8 bits have 16.
    bits = _tiff_tag(image, _TIFF_BITS_PER_SAMPLE, 16)
    if bits <= 16 and _tiff_tag(image, _TIFF_SAMPLE_FORMAT, 1) == _TIFF_SIGNED:
        # PIL takes the sign of 8 bits for a level, and half the range of 16 for all of it.
        raise ValueError("its grey levels are signed numbers, of no stated range")
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = _eight_bits(np.asarray(image), bits)
        if _tiff_tag(image, _TIFF_PHOTOMETRIC, 1) == _TIFF_WHITE_IS_ZERO:
            # PIL turns these round for up to 8 bits only.
            grey = 255 - grey
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "F":
        raise ValueError("its grey levels are floating-point numbers, of no stated range")
    if image.mode == "P" and "transparency" in image.info:
        # This avoids PIL's warning about palettes with transparency; the colours stay the same.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _tiff_tag(image: Image.Image, tag: int, default: int) -> int:
    """A number that a TIFF states, of its first channel; the default for every other image."""
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return int(value[0] if isinstance(value, tuple) else value)


def _eight_bits(grey: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    highest = 2**bits - 1
    if bits > 16 or (grey.size and (grey.min() < 0 or grey.max() > highest)):
        raise ValueError(f"its grey levels go beyond {min(bits, 16)} bits, of no stated range")
    # 255 * grey / highest, rounded to nearest.
    scaled: NDArray[np.uint32] = (510 * grey.astype(np.uint32) + highest) // (2 * highest)
    return scaled.astype(np.uint8)


class EncodedImages(Dataset[Item], ABC):
    """Images that are stored encoded, and decoded on access.

    Attributes:
        targets: (n,), -1 without a label.
        classes: names of the classes by target; empty without labels.

    >>> class InMemory(EncodedImages):
    ...     targets, classes = np.array([1]), ["ant", "bee"]
    ...     def encoded(self, index): return b"no image"
    >>> InMemory()[0]
    Traceback (most recent call last):
    solo_ext.data.reading.UnreadableImage: image 'sample 0' cannot be read: it is no image of B...
    """

    targets: NDArray[Any]
    classes: list[str]

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The encoded bytes of an image.

        Raises:
            UnreadableImage: the image cannot be read.
        """

    def name_of(self, index: int) -> str:
        """Where an image is stored, for messages."""
        return f"sample {index}"

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Item:
        image = decode_image(self.encoded(index), lambda: self.name_of(index))
        return image, int(self.targets[index])


class SkipUnreadable(Dataset[Item]):
    """Marks a data set whose unreadable images are skipped (``data.unreadable=skip``).

    >>> len(SkipUnreadable([("an image", 2), ("another", 0)]))
    2
    """

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return self.images[index]


def read_sample(images: Images, index: int) -> tuple[int, Item]:
    """A sample and its index, or the next readable one if unreadable ones are skipped.

    Raises:
        UnreadableImage: the sample is unreadable and must not be skipped, or
            :data:`MAX_CONSECUTIVE_UNREADABLE` files in a row are unreadable.

    >>> read_sample([("an image", 2), ("another", 0)], 1)
    (1, ('another', 0))
    """
    if not isinstance(images, SkipUnreadable):
        return index, images[index]
    tried, place = min(len(images), MAX_CONSECUTIVE_UNREADABLE), index
    for _ in range(tried):
        last = place % len(images)
        try:
            return last, images[last]
        except UnreadableImage as error:
            # The samples of a lost shard are replaced one for one by those of the next shard, if
            # there is another.
            place += error.span if error.span < len(images) else 1
    raise too_many(tried, images, last)


def max_consecutive_unreadable(images: Images) -> int:
    """Most unreadable samples in a row: those of :data:`MAX_CONSECUTIVE_UNREADABLE` files.

    >>> max_consecutive_unreadable([("an image", 2), ("another", 0)])
    2
    """
    source, _ = unwrap_dataset(images, ())
    return min(len(images), MAX_CONSECUTIVE_UNREADABLE * getattr(source, "per_file", 1))


def too_many(count: int, images: Images, last: int) -> UnreadableImage:
    """Error for ``count`` samples in a row, up to ``last``, that cannot be read.

    >>> str(too_many(1, [("an image", 2)], 0))[:51]
    "data.unreadable='skip': none of 1 images in a row c"
    """
    return UnreadableImage(
        f"data.unreadable='skip': none of {count} images in a row can be read, the last "
        f"{name_of(images, last)!r} ({reason_of(images, last)}); look whether the data set is "
        "whole and its disk there"
    )


def reason_of(images: Images, index: int) -> str:
    """Reads a sample again and says what is wrong with it.

    >>> reason_of([("an image", 2)], 0)
    'it could not be read; now it can'
    """
    try:
        images[index]
    except UnreadableImage as error:
        return error.reason
    return "it could not be read; now it can"


def unwrap_dataset(images: Any, indices: Sequence[int]) -> tuple[Any, Sequence[int]]:
    """The data set inside :class:`SkipUnreadable` and ``Subset``, and the samples' indices in it.

    >>> unwrap_dataset(Subset(["a", "b", "c"], [2, 0]), range(2))
    (['a', 'b', 'c'], array('q', [2, 0]))
    """
    while isinstance(images, SkipUnreadable | Subset):
        if isinstance(images, Subset):
            of_part = images.indices
            images, indices = images.dataset, array("q", (of_part[i] for i in indices))
        else:
            images = images.images
    return images, indices


def name_of(images: Any, index: int) -> str:
    """Where a sample is stored: a path, or the name that its data set gives it.

    >>> name_of([("an image", 0)], 0)
    'sample 0'
    """
    source, (place,) = unwrap_dataset(images, [index])
    return str(source.name_of(place)) if hasattr(source, "name_of") else f"sample {place}"


def targets_of(images: Images) -> list[int]:
    """Targets of all samples, without decoding an image.

    >>> targets_of([("an image", 2), ("another", 0)])
    [2, 0]
    """
    source, indices = unwrap_dataset(images, range(len(images)))
    for name in ("targets", "labels"):
        if hasattr(source, name):
            held = getattr(source, name)
            return [int(held[i]) for i in indices]
    return [source[i][1] for i in indices]


def index_labels(labels: Sequence[int | str | None]) -> tuple[NDArray[np.int64], list[str]]:
    """Targets (n,) of labels, and names of the classes in the order of their targets.

    Classes are numbered in sorted order; the target of ``None`` and of negative numbers is -1.

    >>> index_labels(["bee", "ant", None])
    (array([ 1,  0, -1]), ['ant', 'bee'])
    """
    given: set[Any] = {v for v in labels if isinstance(v, str) or (v is not None and v >= 0)}
    known = sorted(given)
    targets = {label: target for target, label in enumerate(known)}
    return np.array([targets.get(v, -1) for v in labels], np.int64), [str(v) for v in known]


def usual_column(kind: str, found: Sequence[str]) -> str | None:
    """The first column with a usual name for images or labels, else the only one found.

    >>> usual_column("label", ["fine", "label"])
    'label'
    """
    named = [name for name in USUAL_COLUMNS[kind] if name in found]
    if named:
        return named[0]
    return found[0] if len(found) == 1 else None


def file_state(path: str | Path) -> str:
    """Path, size and modification time of a file, which may be missing.

    >>> file_state("/nothing.png")
    '/nothing.png FileNotFoundError'
    """
    path = Path(path)
    try:
        state = path.stat()
    except OSError as error:
        return f"{path.absolute()} {type(error).__name__}"
    return f"{path.absolute()} {state.st_size} {state.st_mtime_ns}"
