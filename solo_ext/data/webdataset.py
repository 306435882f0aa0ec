"""Tar files in the layout of WebDataset: ``000123.jpg`` beside ``000123.cls`` or ``000123.json``.

Each tar is scanned once, from header to header. The offsets of its images are kept in the cache
folder, so that sample i takes one read, and is the same image in every epoch and process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from solo_ext.config.schema import Streaming
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import locked, write_text
from solo_ext.data.folders import parse_text_labels
from solo_ext.data.reading import StorageUnavailable
from solo_ext.data.shards import (
    KEY,
    TARGETS,
    MappedArray,
    Shard,
    ShardedImages,
    Storage,
    cache_errors,
    prepare,
    storage_errors,
    write_array,
)

logger = logging.getLogger(__name__)
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
"""Extensions of images; the image of a sample is its file with the first of these."""
_PLACE = np.dtype([("offset", np.int64), ("size", np.int32)])
_PLACES, _ABOUT = "places.npy", "about.json"
_COMPRESSED = re.compile(r".*\.(tar\.(gz|bz2|xz|zst|lz4)|tgz)")
_RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")
_LONGEST = 200
"""Most characters of a label; the rest is cut off."""
_MOST = 10**6
"""Most tars that a pattern may name."""
_DAMAGE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""Errors that tarfile raises for a file that is no tar."""


@dataclass(frozen=True)
class Tar(Shard):
    """An indexed tar, whose only column is the images."""

    places: MappedArray  # offset and size of the images of all tars
    first: int  # index of its first image in `places`

    def value(self, file: BinaryIO, place: int, column: str) -> bytes:
        try:
            offset, size = self.places.values[self.first + place].item()
        except FileNotFoundError:
            gone = f"{self.places.file}: the index of the tars is gone; "
            raise StorageUnavailable(gone + "the next start goes through them again") from None
        # Read the header too, to notice if another tar has replaced the indexed one.
        file.seek(offset - tarfile.BLOCKSIZE)
        member = file.read(tarfile.BLOCKSIZE + size)
        try:
            header = tarfile.TarInfo.frombuf(member[: tarfile.BLOCKSIZE], "utf-8", "replace")
        except tarfile.HeaderError as error:
            raise ValueError(f"it is not as it was indexed ({error})") from None
        if header.size != size or len(member) != tarfile.BLOCKSIZE + size:
            raise ValueError("it is not as it was indexed")
        return member[tarfile.BLOCKSIZE :]


class _Part(NamedTuple):
    """Index of a tar: places (n,) and labels (n,) of its images, and what is wrong after these.

    ``dotted`` has the extensions of files that are left out because a dot in their name makes
    their extension another one than those of images.
    """

    places: NDArray[Any]
    labels: NDArray[np.str_]
    hashes: dict[str, str]
    wrong: str
    dotted: list[str]


def open_webdataset(
    path: str, key: str, settings: Streaming, *, labelled: bool, whole: bool
) -> ShardedImages:
    """Opens ``data.format: webdataset``.

    The path, the value of config key ``key``, is a folder of tars, a tar, or a pattern such as
    ``folder/train-{000..146}.tar``; local or on S3 or GCS. If ``whole``, a tar that cannot be read
    to its end is refused; else the rest of it is left out.

    Raises:
        ConfigError: there are no tars, they are damaged, compressed, or without images or labels,
            the storage does not respond, or ``cache_limit`` is too low for them.

    >>> open_webdataset("nowhere", "data.train_path", Streaming(), labelled=True, whole=True)
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.train_path='nowhere': no such folder; give a folder of...
    """
    storage, found = _found(path, key, settings, whole)
    shards = [Shard(name, size, 0, {}) for name, (size, _) in found.items()]
    root = storage.root if storage.remote else os.path.abspath(storage.root)
    with cache_errors(settings):
        own = prepare(storage, shards, f"{root} {json.dumps(found)}")
        index = own / _digest(f"{settings.image} {settings.label}")
        index.mkdir(parents=True, exist_ok=True)
        with locked(index / "index.lock"):
            about = _indexed(index, whole)
            if about is None:
                try:
                    about = _index(storage, shards, index, whole)
                except ValueError as error:
                    remedy = "mend it, or leave out what cannot be read with data.unreadable=skip"
                    raise ConfigError(key, path, str(error), remedy) from None
    if wrong := about["wrong"]:
        said = "%s=%r: %d of %d tars are not whole, what is missing is left out; the first: %s"
        logger.warning(said, key, path, len(wrong), len(shards), wrong[0])
    dotted, example = about.get("dotted", (0, ""))
    if dotted:
        logger.warning(
            f"{key}={path!r}: {dotted} files are left out: a name ends at its first dot, and "
            f".{example} is no extension of an image; rename them, or give {KEY}.image={example}"
        )
    places, first = MappedArray(index / _PLACES), 0
    tars = []
    for name, size, samples, hashes in about["shards"]:
        if samples:
            tars.append(Tar(name, size, samples, hashes, places, first))
            first += samples
    if not tars and len(wrong) == len(shards):
        raise ConfigError(key, path, f"no tar can be read; the first: {wrong[0]}", "mend them")
    if not tars:
        problem, remedy = f"no image in the tars of {path!r}", f"name one of {', '.join(_IMAGES)}"
        raise ConfigError(f"{KEY}.image", settings.image, problem, remedy)
    images = ShardedImages(storage, tars, "image", about["digest"])
    if labelled and about["problem"]:
        remedy = "name an extension or a key of .json, or set data.no_labels=true"
        raise ConfigError(f"{KEY}.label", settings.label, about["problem"], remedy)
    if labelled:
        images.label(index / TARGETS, about["classes"])
    return images


def _found(
    path: str, key: str, settings: Streaming, whole: bool
) -> tuple[Storage, dict[str, tuple[int, int]]]:
    """The storage, and size and modification time of every tar; -1 if a tar is missing."""
    folder, last = os.path.split(path)
    single = last.endswith(".tar") and not os.path.isdir(os.path.expanduser(path))
    storage = Storage((folder or ".") if single else path, settings)
    remedy = "give a folder of .tar files, or `folder/name-{000..146}.tar`"
    packed = [last] if _COMPRESSED.fullmatch(last) else []
    if not packed:
        with storage_errors(key, path, "webdataset", "no such folder", remedy):
            listed = storage.listing()
        packed = [] if single else sorted(filter(_COMPRESSED.fullmatch, listed))
    if packed:
        problem = f"{packed[0]!r} is compressed as a whole, and can only be read from its start"
        raise ConfigError(key, path, problem, "unpack it to a plain .tar, with gunzip for example")
    count = math.prod(max(0, int(b) - int(a) + 1) for a, b in _RANGE.findall(last))
    if single and count > _MOST:
        raise ConfigError(key, path, f"{count:,} tars are named", f"{remedy}, at most {_MOST:,}")
    names = _expanded(last) if single else sorted(n for n in listed if n.endswith(".tar"))
    found = {n: listed.get(n, (-1, -1)) for n in names if not n.startswith(".")}
    if not found:
        raise ConfigError(key, path, "no .tar in it", remedy)
    away = [name for name, (size, _) in found.items() if size < 0]
    if away and (whole or len(away) == len(found)):
        # Check this before the tars are scanned, which may take hours.
        problem = f"{away[0]!r} is not there ({len(away)} of {len(found)} tars are not)"
        left_out = "" if len(away) == len(found) else ", or leave it out with data.unreadable=skip"
        raise ConfigError(key, path, problem, remedy + left_out)
    return storage, found


def _expanded(name: str) -> list[str]:
    """The names of ``name-{000..146}.tar``."""
    found = _RANGE.search(name)
    if found is None:
        return [name]
    first, last = found.groups()
    before, after = name[: found.start()], _expanded(name[found.end() :])
    numbers = range(int(first), int(last) + 1)
    return [f"{before}{number:0{len(first)}}{rest}" for number in numbers for rest in after]


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def _indexed(index: Path, whole: bool) -> dict[str, Any] | None:
    """The index of an earlier start; ``None`` if it cannot be used."""
    try:
        about: dict[str, Any] = json.loads((index / _ABOUT).read_text())
        sizes = {len(np.load(index / n, mmap_mode="r")) for n in (_PLACES, TARGETS)}
        usable = sizes == {about["count"]} and not (whole and about["wrong"])
    except (OSError, ValueError, KeyError):
        return None
    return about if usable else None


def _index(storage: Storage, shards: list[Shard], index: Path, whole: bool) -> dict[str, Any]:
    """Scans the tars and writes the index.

    Raises:
        ValueError: a tar is damaged, and all have to be whole.
    """
    held, wrong, known, dotted = list[Any](), list[str](), dict[str, int](), list[str]()
    places, codes = [np.empty(0, _PLACE)], [np.empty(0, np.int32)]
    # Scan several remote tars at once, unless `cache_limit` could remove one while it is read.
    pool = ThreadPoolExecutor(4 if storage.remote and storage.limit is None else 1)
    console = Console(stderr=True)
    shown = Progress(console=console, transient=True, disable=not console.is_interactive)
    try:
        found = pool.map(_part, itertools.repeat(storage), shards)
        with shown:
            for shard, part in zip(shards, shown.track(found, len(shards)), strict=True):
                if part.wrong:
                    wrong.append(f"{shard.name}, {part.wrong}")
                    if whole:
                        raise ValueError(f"a tar cannot be read: {wrong[0]}")
                dotted += part.dotted
                held.append((shard.name, shard.size, len(part.places), part.hashes))
                distinct, which = np.unique(part.labels, return_inverse=True)
                numbers = [known.setdefault(str(label), len(known)) for label in distinct]
                places.append(part.places)
                codes.append(np.array(numbers, np.int32)[which])
    finally:
        pool.shutdown(cancel_futures=True)
    targets, classes, problem = dict[str, int](), list[str](), "no sample of its tars has a label"
    try:
        targets, classes = parse_text_labels([label for label in known if label])
    except ValueError as error:
        problem = str(error)
    by_code = np.array([targets.get(label, -1) for label in known], np.int32)
    at, of = np.concatenate(places), by_code[np.concatenate(codes)]
    digest = hashlib.sha256(json.dumps([entry[:3] for entry in held]).encode())
    digest.update(at.tobytes() + of.tobytes())
    about = {"shards": held, "count": len(at), "classes": classes, "wrong": wrong}
    about |= {"problem": None if targets else problem, "digest": digest.hexdigest()}
    about["dotted"] = len(dotted), dotted[0] if dotted else ""
    # `about.json` says that the arrays are valid: remove it before writing them, and write it last.
    (index / _ABOUT).unlink(missing_ok=True)
    write_array(index / _PLACES, at)
    write_array(index / TARGETS, of)
    write_text(index / _ABOUT, json.dumps(about))
    return about


def _part(storage: Storage, shard: Shard) -> _Part:
    """Scans a tar."""
    places, labels, wrong, hashes = [], [], "", dict[str, str]()
    settings, dotted = storage.settings, list[str]()
    images = (settings.image.lower(),) if settings.image else _IMAGES
    ends = tuple(f".{kind}" for kind in images)
    try:
        with storage.open(shard) as opened:
            for _, held in itertools.groupby(_members(opened, shard.size), lambda m: m[0]):
                sample = {}
                for _, kind, offset, size in held:
                    if kind in sample:
                        raise ValueError(f"a sample has .{kind} twice")
                    sample[kind] = offset, size
                image = next((kind for kind in images if kind in sample), None)
                if image is not None:
                    places.append(sample[image])
                    labels.append(_label(opened, sample, settings.label))
                else:
                    dotted += [kind for kind in sample if kind.endswith(ends)]
            if storage.remote:
                opened.seek(0)
                hashes["sha256"] = hashlib.sha256(opened.read()).hexdigest()
    except _DAMAGE as error:
        wrong = str(error)
    return _Part(np.array(places, _PLACE), np.array(labels, np.str_), hashes, wrong, dotted)


def _members(file: BinaryIO, end: int) -> Iterator[tuple[Any, str, int, int]]:
    """Yields sample, extension, offset and size of files; names are split as WebDataset does.

    Names are compared and never opened. Links, devices and sparse files are skipped.

    Raises:
        ValueError, tarfile.TarError: the tar is damaged.
    """
    last = 0
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            # tarfile would keep every member in memory.
            tar.members = []  # type: ignore[attr-defined]
            folder, _, name = member.name.rpartition("/")
            stem, _, kind = name.partition(".")
            size, start, last = member.size, last, member.offset_data
            # A negative size would send tarfile back, in an endless loop.
            if size < 0 or last <= start or last + size > end:
                raise ValueError("a file in it goes beyond its end")
            if stem and kind and member.isreg() and not member.issparse() and size < 2**31:
                yield (folder, stem), kind.lower(), last, size
        file.seek(tar.offset)
        # tarfile does not notice that a tar is cut off or damaged between two files.
        if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
            raise ValueError(f"at byte {tar.offset} is neither a file nor the end of a tar")


def _label(file: BinaryIO, sample: dict[str, tuple[int, int]], name: str | None) -> str:
    """A sample's label: its file with extension ``name``, or that key of its JSON, or empty."""
    kind = (name or "cls").lower()
    read = kind if kind in sample else "json"
    if read not in sample:
        return ""
    offset, size = sample[read]
    file.seek(offset)
    try:
        value: Any = file.read(size).decode().strip()
        if read != kind:
            value = json.loads(value).get(name or "label")
    except (ValueError, RecursionError, AttributeError):
        return ""
    return str(value)[:_LONGEST] if isinstance(value, str | int | float) else ""
