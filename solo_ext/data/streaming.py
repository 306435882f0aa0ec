"""Shards of MosaicML's Streaming (MDS).

MosaicML's library is not used: it needs the process group before the images are opened, a process
that waits for a shard waits forever if the download failed, and its last release refuses the
versions of NumPy and huggingface-hub of 2025.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from solo_ext.config.schema import Streaming
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import atomic_write, locked, write_text
from solo_ext.data.reading import index_labels, usual_column
from solo_ext.data.shards import (
    KEY,
    TARGETS,
    Shard,
    ShardedImages,
    Storage,
    cache_errors,
    prepare,
    storage_errors,
    write_array,
)

INDEX = "index.json"
_IMAGES = ("bytes", "jpeg", "png")
"""Encodings of columns whose values are encoded images."""
_NUMBERS = {"int": np.dtype(np.int64)} | {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True)
class MDS(Shard):
    """A shard in MDS, as an entry of ``index.json`` describes it."""

    columns: Mapping[str, tuple[str, int | None]]
    """Encoding and size in bytes (``None`` if it varies) by name, in the order of a sample."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> MDS:
        """Reads an entry.

        Raises:
            KeyError, TypeError, ValueError: the entry is damaged, or of another kind.
        """
        if (entry["version"], entry["format"]) != (2, "mds"):
            raise ValueError("a shard is not MDS of version 2")
        if entry["compression"]:
            # Compressed shards gain nothing, because images are compressed already.
            raise ValueError(f"shards are compressed ({entry['compression']}), write plain ones")
        raw = entry["raw_data"]
        name, size, samples = raw["basename"], int(raw["bytes"]), int(entry["samples"])
        if os.path.basename(name) != name or name in ("", ".", "..") or min(size, samples) < 0:
            raise ValueError(f"{name!r} is no shard in this folder")
        kinds = zip(entry["column_encodings"], entry["column_sizes"], strict=True)
        columns = dict(zip(entry["column_names"], kinds, strict=True))
        return cls(name, size, samples, dict(raw["hashes"]), columns)

    def value(self, file: BinaryIO, place: int, column: str) -> bytes:
        # The number of samples is followed by the offset of each, and of the last one's end.
        file.seek(4 + 4 * place)
        begin, end = np.frombuffer(file.read(8), np.uint32).tolist()
        if not 4 * (self.samples + 2) <= begin <= end <= self.size:
            raise ValueError("a sample lies outside of it")
        file.seek(begin)
        sample = file.read(end - begin)
        # A sample begins with the sizes of its columns of varying size; all columns follow.
        varying = sum(size is None for _, size in self.columns.values())
        if len(sample) < 4 * varying:
            raise ValueError("a sample is shorter than the sizes of its columns")
        sizes = iter(np.frombuffer(sample[: 4 * varying], np.uint32).tolist())
        at = 4 * varying
        for name, (_, size) in self.columns.items():
            length = next(sizes) if size is None else size
            if name == column:
                if at + length > len(sample):
                    raise ValueError("a column lies outside of its sample")
                return sample[at : at + length]
            at += length
        raise ValueError(f"it has no column {column!r}")


def open_streaming(path: str, key: str, settings: Streaming, *, labelled: bool) -> ShardedImages:
    """Opens ``data.format: streaming``, a folder with an ``index.json``, local or on S3 or GCS.

    Raises:
        ConfigError: there is no index or it is damaged, columns are not of images and labels, the
            storage does not respond, or ``cache_limit`` is too low for the shards.
        UnreadableImage: labels have to be read from the shards, and one shard is unreadable.

    >>> open_streaming("nowhere", "data.train_path", Streaming(), labelled=True)
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.train_path='nowhere': no index.json there; give a fol...
    """
    storage = Storage(path, settings)
    remedy = "give a folder of shards; `solo-ext data convert` writes one"
    with storage_errors(key, path, "streaming", f"no {INDEX} there", remedy):
        content = storage.read(INDEX)
    try:
        index = json.loads(content)
        shards = [shard for shard in map(MDS.of, index["shards"]) if shard.samples]
        known = index.get("classes")
        if known is not None and not all(isinstance(name, str) for name in known):
            raise ValueError("classes are not names")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"its {INDEX} is damaged, or of another kind ({error})"
        raise ConfigError(key, path, problem, "`solo-ext data convert` writes one") from None
    if not shards:
        raise ConfigError(key, path, "no sample in its shards", "give a folder with images")
    digest = hashlib.sha256(content).hexdigest()
    images = ShardedImages(storage, shards, _column(shards[0], "image", settings.image), digest)
    with cache_errors(settings):
        own = prepare(storage, shards, digest)
    if labelled:
        try:
            images.label(*_labels(images, shards, known, own))
        except (OSError, ValueError) as error:
            problem = f"its {TARGETS} cannot be read ({error})"
            raise ConfigError(key, path, problem, "write the shards again") from None
    return images


def _column(shard: MDS, kind: str, given: str | None) -> str:
    """The column of images or labels: the given one, one with a usual name, or the only one."""
    fits = _IMAGES if kind == "image" else (*_NUMBERS, "str", "str_int")
    there = [name for name, (encoding, _) in shard.columns.items() if encoding in fits]
    chosen = usual_column(kind, there) if given is None else given
    if chosen is not None and chosen in there:
        return chosen
    listed = ", ".join(f"{name} ({encoding})" for name, (encoding, _) in shard.columns.items())
    problem = f"{'no' if given or not there else 'several'} columns of {kind}s"
    remedy = f"name one of {', '.join(fits)}" if there else f"{kind}s are {', '.join(fits)}"
    if kind == "label":
        remedy += ", or set data.no_labels=true"
    raise ConfigError(f"{KEY}.{kind}", given, problem, f"{remedy}; columns: {listed}")


def _labels(
    images: ShardedImages, shards: list[MDS], classes: list[str] | None, own: Path
) -> tuple[Path, list[str]]:
    """File of the targets, and names of the classes.

    ``solo-ext data convert`` writes both; the labels in shards of other programs are read once.
    """
    storage, mine = images.storage, own / TARGETS
    if classes is not None and not storage.remote:
        return storage.folder / TARGETS, classes
    with cache_errors(storage.settings):
        own.mkdir(parents=True, exist_ok=True)
    if classes is not None:
        if not mine.exists():
            content = storage.read(TARGETS)
            with cache_errors(storage.settings):
                atomic_write(mine, lambda scratch: scratch.write_bytes(content))
        return mine, classes
    column = _column(shards[0], "label", storage.settings.label)
    # Hash the column's name: in an index from someone else it could be a path.
    of_column = hashlib.sha256(os.fsencode(column)).hexdigest()[:16]
    names, mine = own / f"{of_column}.json", own / f"{of_column}.npy"
    with cache_errors(storage.settings), locked(own / "labels.lock"):
        if not names.exists():
            encoding, _ = shards[0].columns[column]
            values = [_label(images.value(i, column), encoding) for i in range(len(images))]
            targets, known = index_labels(values)
            write_array(mine, targets.astype(np.int32))
            write_text(names, json.dumps(known))
    return mine, json.loads(names.read_text())


def _label(value: bytes, encoding: str) -> Any:
    if encoding in _NUMBERS:
        return int(np.frombuffer(value, _NUMBERS[encoding])[0])
    return int(value) if encoding == "str_int" else value.decode()
