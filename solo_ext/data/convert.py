"""Writes the images of any format into shards, which ``data.format: streaming`` reads."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from solo_ext.core.draws import derive_seed, permutation
from solo_ext.core.errors import UserError
from solo_ext.core.files import append_lines, atomic_write, locked, read_jsonl, write_text
from solo_ext.data.huggingface import HuggingFaceImages
from solo_ext.data.images import class_names, images_fingerprint
from solo_ext.data.reading import (
    EncodedImages,
    Images,
    SkipUnreadable,
    UnreadableImage,
    decode_image,
    name_of,
    targets_of,
    unwrap_dataset,
)
from solo_ext.data.shards import TARGETS, write_array
from solo_ext.data.streaming import INDEX

STARTED = "converting.jsonl"
"""Log of an unfinished conversion: first what it converts, then one line per finished shard."""
_MOST = 2**32 - 1
"""Largest shard in bytes: offsets in it have 32 bits."""
_PREFETCH = 64
"""Number of images that are read at a time."""


class Converted(NamedTuple):
    """Numbers of images and shards in a folder, and names of the images that were left out."""

    images: int
    shards: int
    unreadable: list[str]


def convert(
    images: Images,
    out: Path,
    shard_bytes: int = 1 << 26,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Writes images into shards of MosaicML's Streaming (MDS), in a fixed random order.

    The order depends only on the number of images. It mixes the classes, because a batch comes from
    few shards. Encoded images are written as they are, others as PNG. A conversion that was killed
    continues after its last complete shard. ``index.json`` is written last.

    A shard has at most ``shard_bytes`` bytes, or a single image. ``progress`` is called with the
    number of images done and their total number.

    Raises:
        UserError: the folder holds shards already, or an unfinished conversion of other images.
        UnreadableImage: an image is unreadable, and ``images`` does not skip these.

    >>> import tempfile
    >>> from solo_ext.config.schema import Images as Section
    >>> from solo_ext.data.digits import digits_folder
    >>> from solo_ext.data.images import open_images
    >>> digits = Section(dataset="custom", train_path=str(digits_folder("val")))
    >>> out = Path(tempfile.mkdtemp())
    >>> convert(open_images(digits, "train"), out, shard_bytes=100_000).images
    397
    >>> shards = Section(dataset="custom", train_path=str(out), format="streaming")
    >>> len(open_images(shards, "train"))
    397
    """
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".lock", 0):
        # A conversion that was killed while it wrote a file has left its scratch file.
        for left in out.glob(".*.saving"):
            left.unlink()
        if (out / INDEX).exists():
            raise UserError(f"{str(out)!r} holds shards already; name another folder with --out")
        what = {
            "images": images_fingerprint(images, by_name=True),
            "count": len(images),
            "skip": isinstance(images, SkipUnreadable),
            "shard_bytes": shard_bytes,
        }
        source = unwrap_dataset(images, [])[0]
        if isinstance(source, HuggingFaceImages):
            # What identifies a table by name is its labels alone.
            what["table"] = source.fingerprint or _names(source)
        found = read_jsonl(out / STARTED)
        if not found:
            append_lines(out / STARTED, [what])
        started, *shards = found or [what]
        if started != what:
            raise UserError(
                f"{str(out)!r} holds a conversion of other images, or into shards of another size; "
                "name another folder, or remove it"
            )
        return _converted(images, out, shard_bytes, progress, shards)


def _names(table: HuggingFaceImages) -> str:
    """A digest of the files that a table names."""
    names = "\n".join(table.name_of(index) for index in range(len(table)))
    return hashlib.sha256(os.fsencode(names)).hexdigest()


def _converted(
    images: Images,
    out: Path,
    shard_bytes: int,
    progress: Callable[[int, int], None],
    shards: list[dict[str, Any]],
) -> Converted:
    targets = np.array(targets_of(images), dtype=np.int32)
    shard = _Shard(shard_bytes)

    def write(done: int) -> None:
        name, content = f"shard.{len(shards):05}.mds", shard.content()
        atomic_write(out / name, lambda scratch: scratch.write_bytes(content))
        entry = shard.entry(name, content)
        shards.append({"index": entry, "done": done, "left_out": shard.left_out})
        append_lines(out / STARTED, shards[-1:])

    for at, index, encoded in _files(images, shards[-1]["done"] if shards else 0):
        progress(at, len(images))
        if encoded is None:
            shard.left_out.append(index)
            continue
        sample = shard.sample(encoded, int(targets[index]))
        if shard.samples and shard.size + len(sample) + 4 > min(shard_bytes, _MOST):
            write(at)
            shard = _Shard(shard_bytes)
        shard.samples.append(sample)
        shard.size += len(sample) + 4
    if shard.samples or shard.left_out:
        write(len(images))
    progress(len(images), len(images))
    left_out = {index for entry in shards for index in entry["left_out"]}
    order = permutation(len(images), derive_seed(0))(np.arange(len(images)))
    written = order[~np.isin(order, list(left_out))]
    write_array(out / TARGETS, targets[written])
    entries = [entry["index"] for entry in shards if entry["index"]["samples"]]
    about = {"version": 2, "shards": entries, "classes": class_names(images)}
    write_text(out / INDEX, json.dumps(about, sort_keys=True))
    (out / STARTED).unlink()
    return Converted(len(written), len(entries), [name_of(images, i) for i in sorted(left_out)])


def _files(images: Images, start: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yields position (from ``start``), index and encoded image; ``None`` for an unreadable one."""

    def read(index: int) -> bytes | None:
        try:
            return _encoded(images, index)
        except UnreadableImage:
            if not isinstance(images, SkipUnreadable):
                raise
            return None

    order = permutation(len(images), derive_seed(0))
    # Threads run in parallel, because PIL releases the GIL while it decodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(start, len(images), _PREFETCH):
            places = np.arange(first, min(first + _PREFETCH, len(images)))
            some = order(places).tolist()
            yield from zip(places.tolist(), some, pool.map(read, some), strict=True)


def _encoded(images: Images, index: int) -> bytes:
    """An image's encoded bytes, after checking that they can be decoded."""
    source, (place,) = unwrap_dataset(images, [index])
    if isinstance(source, EncodedImages):
        encoded = source.encoded(place)
        decode_image(encoded, lambda: name_of(images, index))
        return encoded
    file = io.BytesIO()
    source[place][0].save(file, "PNG")
    return file.getvalue()


class _Shard:
    """An MDS shard that is built in memory, with the columns ``image`` and ``label``."""

    def __init__(self, limit: int) -> None:
        self.about = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": ["sha256"],
            "size_limit": limit,
            "column_names": ["image", "label"],
            "column_encodings": ["bytes", "int"],
            "column_sizes": [None, 8],
        }
        self.header = json.dumps(self.about, sort_keys=True).encode()
        self.samples: list[bytes] = []
        self.left_out: list[int] = []
        self.size = 8 + len(self.header)

    @staticmethod
    def sample(image: bytes, label: int) -> bytes:
        return np.uint32(len(image)).tobytes() + image + np.int64(label).tobytes()

    def content(self) -> bytes:
        count = len(self.samples)
        sizes = [4 + 4 * (count + 1) + len(self.header), *map(len, self.samples)]
        offsets = np.cumsum(sizes).astype(np.uint32)
        return b"".join([np.uint32(count).tobytes(), offsets.tobytes(), self.header, *self.samples])

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        hashes = {"sha256": hashlib.sha256(content).hexdigest()}
        raw = {"basename": name, "bytes": len(content), "hashes": hashes}
        return {**self.about, "samples": len(self.samples), "raw_data": raw, "zip_data": None}
