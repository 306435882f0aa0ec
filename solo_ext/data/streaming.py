"""Images in shards of MosaicML's Streaming (MDS): in a folder, or copied from S3 or GCS when asked.

The shards are a data set with numbers, so that order, resumption and the division among processes
are those of every other format. The library itself reads them as a stream of its own: it needs the
process group before the images are opened, a process that waits for a shard whose download failed
waits forever, and its last release refuses the versions of NumPy and huggingface-hub of 2025.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from solo_ext.config.schema import Streaming
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import atomic_write, cache_root, locked, open_regular
from solo_ext.data.reading import (
    NOT_THE_IMAGES_FAULT,
    Item,
    StorageAway,
    UnreadableImage,
    decode_image,
)

INDEX, TARGETS = "index.json", "targets.npy"
_KEY = "data.streaming"
_IMAGES = ("bytes", "jpeg", "png")
"""Encodings of a column whose values are files of images."""
_NUMBERS = {"int": np.dtype(np.int64)} | {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
_USUAL = {
    "image": ("image", "img", "jpg", "jpeg", "png"),
    "label": ("label", "labels", "target", "targets", "class", "cls"),
}
_UNITS = {"mb": 2**20, "gb": 2**30, "tb": 2**40}
_LOCKS = 64
"""Files of locks; two shards of one are downloaded one after the other."""
_LONGEST = 300
"""Characters of a storage's own message."""
_AGAIN = 8
"""How often a copy may be removed, to make room, between its download and its opening."""


@dataclass(frozen=True)
class Shard:
    """An entry of ``index.json``.

    Attributes:
        name: of the file.
        size: its bytes.
        samples: how many.
        hashes: hexadecimal digests of the file by algorithm.
        columns: encoding, and bytes unless they vary, by name and in the order of a sample.
    """

    name: str
    size: int
    samples: int
    hashes: Mapping[str, str]
    columns: Mapping[str, tuple[str, int | None]]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Shard:
        """Reads an entry.

        Raises:
            KeyError, TypeError, ValueError: it is damaged, or of another kind.
        """
        if (entry["version"], entry["format"]) != (2, "mds"):
            raise ValueError("a shard is not MDS of version 2")
        if entry["compression"]:
            # The files of images are compressed already.
            raise ValueError(f"shards are compressed ({entry['compression']}), write plain ones")
        raw = entry["raw_data"]
        name, size, samples = raw["basename"], int(raw["bytes"]), int(entry["samples"])
        if os.path.basename(name) != name or name in ("", ".", "..") or min(size, samples) < 0:
            raise ValueError(f"{name!r} is no shard in this folder")
        kinds = zip(entry["column_encodings"], entry["column_sizes"], strict=True)
        columns = dict(zip(entry["column_names"], kinds, strict=True))
        return cls(name, size, samples, dict(raw["hashes"]), columns)

    def wrong(self, content: bytes) -> str | None:
        """What is wrong with the content of its file; ``None`` if it is the one that was indexed.

        Digests of algorithms that Python lacks are not compared.
        """
        if len(content) != self.size:
            return f"the shard has {len(content)} bytes, and {self.size} in {INDEX}"
        for algorithm, digest in self.hashes.items():
            known = algorithm in hashlib.algorithms_guaranteed
            if known and hashlib.new(algorithm, content).hexdigest() != digest:
                return f"the shard is damaged: its {algorithm} is not that in {INDEX}"
        return None

    def value(self, file: BinaryIO, place: int, column: str) -> bytes:
        """The bytes of a column of a sample.

        Raises:
            ValueError: the file is damaged.
        """
        # Behind the number of samples: where each begins, and the last ends.
        file.seek(4 + 4 * place)
        begin, end = np.frombuffer(file.read(8), np.uint32).tolist()
        if not 4 * (self.samples + 2) <= begin <= end <= self.size:
            raise ValueError("a sample lies outside of it")
        file.seek(begin)
        sample = file.read(end - begin)
        # A sample: the sizes of the columns of varying size, then the columns.
        varying = sum(size is None for _, size in self.columns.values())
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


class Storage:
    """A folder of shards: a local one, or copies of one on S3 or GCS.

    Copies of this process and others are in one folder; each is downloaded once. Whoever makes room
    removes those that were not read for longest.

    Args:
        root: a folder, or ``s3://bucket/folder`` or ``gs://bucket/folder``.
        settings: the section ``data.streaming``.

    >>> Storage("shards", Streaming()).remote, Storage("s3://bucket/shards", Streaming()).remote
    (False, True)
    """

    def __init__(self, root: str, settings: Streaming) -> None:
        self.root, self.settings = root.rstrip("/"), settings
        self.remote = "://" in root
        self.folder = Path(root)
        self.limit = None
        if settings.cache_limit is not None:
            self.limit = int(settings.cache_limit[:-2]) * _UNITS[settings.cache_limit[-2:]]
        self._files: tuple[int, Any] | None = None
        self._lost: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None, "_lost": {}}

    def copy_to(self, folder: Path) -> None:
        """Where copies are from now on."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def read(self, name: str) -> bytes:
        """Reads a file where it is kept.

        Raises:
            FileNotFoundError: it is not there.
            OSError: the storage does not answer, or refuses.
        """
        if not self.remote:
            with open_regular(Path(self.root) / name) as opened:
                return opened.read()
        with self._opened().open_input_stream(f"{self.root.partition('://')[2]}/{name}") as file:
            return bytes(file.read())

    def open(self, shard: Shard) -> BinaryIO:
        """Opens a shard, after downloading it if it is not here.

        Raises:
            ValueError: it is not there, or damaged.
            StorageAway: the storage does not answer.
        """
        if shard.name in self._lost:
            raise ValueError(self._lost[shard.name])
        for _ in range(_AGAIN):
            try:
                file = open_regular(self.folder / shard.name)
            except FileNotFoundError:
                if not self.remote:
                    raise ValueError("the shard is not there") from None
                self._download(shard)
                continue
            except UserError as error:
                cause = error.__cause__
                if isinstance(cause, OSError) and cause.errno in NOT_THE_IMAGES_FAULT:
                    raise cause from None
                raise ValueError(str(error)) from None
            size = os.fstat(file.fileno()).st_size
            if size == shard.size:
                if self.limit is not None:
                    os.utime(file.fileno())
                return file
            file.close()
            if not self.remote:
                raise ValueError(f"the shard has {size} bytes, and {shard.size} in {INDEX}")
            (self.folder / shard.name).unlink(missing_ok=True)
        raise StorageAway(
            f"{_KEY}.cache_limit={self.settings.cache_limit!r}: {shard.name} was removed to make "
            f"room before it was read, {_AGAIN} times; raise the limit"
        )

    def _download(self, shard: Shard) -> None:
        number = int.from_bytes(shard.name.encode(), "big") % _LOCKS
        with locked(self.folder / f"{number}.lock"):
            if (self.folder / shard.name).exists():
                # Another process was first.
                return
            for left in self.folder.glob(f".{shard.name}.*.saving"):
                # A process that was killed left it.
                left.unlink(missing_ok=True)
            content = self._whole(shard)
            self._make_room(shard.size)
            atomic_write(self.folder / shard.name, lambda scratch: scratch.write_bytes(content))

    def _whole(self, shard: Shard) -> bytes:
        """The content of a shard; tries again if it is missing or damaged, or nobody answers."""
        for attempt in range(1 + self.settings.download_retry):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            away = None
            try:
                content = self.read(shard.name)
            except FileNotFoundError:
                wrong: str | None = "the shard is not there"
            except OSError as error:
                away = error
            else:
                wrong = shard.wrong(content)
                if wrong is None:
                    return content
        if away is not None:
            # Skipping would leave out whatever is asked for until the storage is back.
            raise StorageAway(
                f"{self.root}/{shard.name}: {_said(away)} (tried {attempt + 1} times); look at the "
                "connection and the credentials"
            )
        self._lost[shard.name] = f"{wrong} (tried {attempt + 1} times)"
        raise ValueError(self._lost[shard.name])

    def _make_room(self, size: int) -> None:
        if self.limit is None:
            return
        with locked(self.folder / "room.lock"):
            held = []
            for entry in os.scandir(self.folder):
                # Another process may be replacing or removing it.
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.endswith(".lock"):
                        state = entry.stat()
                        held.append((state.st_mtime_ns, state.st_size, entry.path))
            free = self.limit - size - sum(bytes_ for _, bytes_, _ in held)
            for _, bytes_, path in sorted(held):
                if free >= 0:
                    break
                if not path.endswith(".saving"):
                    Path(path).unlink(missing_ok=True)
                    free += bytes_

    def _opened(self) -> Any:
        """The file system of this process: a connection does not outlive a fork."""
        if self._files is None or self._files[0] != os.getpid():
            self._files = os.getpid(), _file_system(self.root, self.settings.download_timeout)
        return self._files[1]


def _file_system(root: str, timeout: float) -> Any:
    from pyarrow import fs

    scheme, _, place = root.partition("://")
    if scheme == "gs":
        return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=timeout))
    if scheme != "s3":
        raise OSError(f"{scheme}:// is not known, only s3:// and gs://")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
    named = {"endpoint_override": endpoint} if endpoint else {}
    if not named and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ):
        named = {"region": fs.resolve_s3_region(place.partition("/")[0])}
    # Tries again are counted here, so that there is one number of them.
    once = fs.AwsStandardS3RetryStrategy(max_attempts=1)
    timeouts = {"connect_timeout": timeout, "request_timeout": timeout}
    return fs.S3FileSystem(retry_strategy=once, **timeouts, **named)


def _said(error: OSError) -> str:
    said = (error.strerror or str(error).strip() or type(error).__name__).splitlines()[0]
    # Google's repeat themselves.
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."


class StreamingImages(Dataset[Item]):
    """Images in shards; sample i is the i-th in the order of ``index.json``.

    Args:
        storage: where the shards are.
        shards: at least one.
        column: of the images.
        fingerprint: changes with the images and their order.

    Attributes:
        shard_starts: (S + 1,) first sample of every shard, and their number.
        per_file: most samples of a shard.

    >>> shard = Shard("shard.00000.mds", 900, 10, {}, {"image": ("bytes", None)})
    >>> images = StreamingImages(Storage("shards", Streaming()), [shard] * 3, "image", "")
    >>> len(images), images.name_of(23)
    (30, 'shards/shard.00000.mds, sample 3')
    """

    def __init__(
        self,
        storage: Storage,
        shards: list[Shard],
        column: str,
        fingerprint: str,
    ) -> None:
        self.storage, self.shards, self.column = storage, shards, column
        self.fingerprint = fingerprint
        samples = [shard.samples for shard in shards]
        self.shard_starts = np.concatenate([[0], np.cumsum(samples, dtype=np.int64)])
        self.per_file = max(samples)
        self.classes: list[str] = []
        self._labels: Path | None = None
        self._targets: NDArray[np.int32] | None = None

    def label(self, targets: Path, classes: list[str]) -> None:
        """Gives them their targets, a file of (n,) int32.

        Raises:
            OSError, ValueError: it is no such file.
        """
        found = np.load(targets, mmap_mode="r", allow_pickle=False)
        if found.shape != (len(self),) or found.dtype != np.int32:
            raise ValueError(f"{TARGETS} is not of these shards")
        self._labels, self._targets, self.classes = targets, None, classes
        self.fingerprint = f"{self.fingerprint} {classes}"

    @property
    def targets(self) -> NDArray[np.int32]:
        """Targets (n,), which the processes of a machine share; -1 without labels."""
        if self._targets is None:
            if self._labels is None:
                return np.broadcast_to(np.int32(-1), len(self))
            # Copy on write, because torch warns of arrays that cannot be written to.
            self._targets = np.load(self._labels, mmap_mode="c", allow_pickle=False)
        return self._targets

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_targets": None}

    def __getitem__(self, index: int) -> Item:
        return decode_image(self.encoded(index), self.name_of(index)), int(self.targets[index])

    def encoded(self, index: int) -> bytes:
        """The file of an image."""
        return self.value(index, self.column)

    def value(self, index: int, column: str) -> bytes:
        """The bytes of a column of a sample.

        Raises:
            UnreadableImage: its shard is not there, or damaged.
            StorageAway: the storage does not answer.
        """
        number, place = self._place(index)
        shard = self.shards[number]
        try:
            with self.storage.open(shard) as file:
                return shard.value(file, place, column)
        except ValueError as error:
            lost = UnreadableImage(self.name_of(index), str(error))
            lost.span = shard.samples
            raise lost from None

    def name_of(self, index: int) -> str:
        """``<root>/<shard>, sample <place>``."""
        number, place = self._place(index)
        return f"{self.storage.root}/{self.shards[number].name}, sample {place}"

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self.shard_starts, index, side="right")) - 1
        return number, int(index - self.shard_starts[number])


def open_streaming(path: str, key: str, settings: Streaming, *, labelled: bool) -> StreamingImages:
    """Opens ``data.format: streaming``.

    Args:
        path: folder with an ``index.json``, local or on S3 or GCS.
        key: dotted key of the path.
        settings: the section ``data.streaming``.
        labelled: whether labels are read.

    Raises:
        ConfigError: there is no index or it is damaged, columns are not of images and labels, the
            storage does not answer, or the limit is too low for the shards.
        UnreadableImage: labels have to be read from the shards, and one of these cannot be.

    >>> open_streaming("nowhere", "data.train_path", Streaming(), labelled=True)
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.train_path='nowhere': no index.json there; give a fol...
    """
    storage = Storage(path if "://" in path else str(Path(path).expanduser()), settings)
    try:
        content = storage.read(INDEX)
        index = json.loads(content)
        shards = [shard for shard in map(Shard.of, index["shards"]) if shard.samples]
        known = index.get("classes")
        if known is not None and not all(isinstance(name, str) for name in known):
            raise ValueError("classes are not names")
    except ImportError:
        problem, remedy = "pyarrow is not installed", "pip install 'solo-ext[streaming]'"
        raise ConfigError("data.format", "streaming", problem, remedy) from None
    except FileNotFoundError:
        remedy = "give a folder of shards; `solo-ext data convert` writes one"
        raise ConfigError(key, path, f"no {INDEX} there", remedy) from None
    except OSError as error:
        remedy = "look at the address, the connection and the credentials"
        raise ConfigError(key, path, _said(error), remedy) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"its {INDEX} is damaged, or of another kind ({error})"
        raise ConfigError(key, path, problem, "`solo-ext data convert` writes one") from None
    if not shards:
        raise ConfigError(key, path, "no sample in its shards", "give a folder with images")
    most = max(shard.size for shard in shards) * (settings.shuffle_shards + 2)
    if storage.remote and storage.limit is not None and storage.limit < most:
        raise ConfigError(
            f"{_KEY}.cache_limit",
            settings.cache_limit,
            f"{_KEY}.shuffle_shards={settings.shuffle_shards} of these shards and the next two "
            f"take up to {most / 2**20:.0f} MB",
            "raise the limit, or shuffle fewer shards",
        )
    digest = hashlib.sha256(content).hexdigest()
    images = StreamingImages(storage, shards, _column(shards[0], "image", settings.image), digest)
    # Another index at the same address has other shards of the same names.
    place = hashlib.sha256(f"{storage.root} {digest}".encode()).hexdigest()[:32]
    own = Path(settings.cache_dir or cache_root() / "shards") / place
    if storage.remote:
        storage.copy_to(own / "shards")
    if labelled:
        try:
            images.label(*_labels(images, known, own))
        except (OSError, ValueError) as error:
            problem = f"its {TARGETS} cannot be read ({error})"
            raise ConfigError(key, path, problem, "write the shards again") from None
    return images


def _column(shard: Shard, kind: str, given: str | None) -> str:
    """The column of images or labels: the one given, else that of a usual name, or the only one."""
    fits = _IMAGES if kind == "image" else (*_NUMBERS, "str", "str_int")
    there = [name for name, (encoding, _) in shard.columns.items() if encoding in fits]
    if given is None:
        named = [name for name in _USUAL[kind] if name in there]
        found = named[:1] or there
        if len(found) == 1:
            return found[0]
    elif given in there:
        return given
    listed = ", ".join(f"{name} ({encoding})" for name, (encoding, _) in shard.columns.items())
    problem = f"{'no' if given or not there else 'several'} columns of {kind}s"
    remedy = f"name one of {', '.join(fits)}" if there else f"{kind}s are {', '.join(fits)}"
    if kind == "label":
        remedy += ", or set data.no_labels=true"
    raise ConfigError(f"{_KEY}.{kind}", given, problem, f"{remedy}; columns: {listed}")


def _labels(
    images: StreamingImages, classes: list[str] | None, own: Path
) -> tuple[Path, list[str]]:
    """File of the targets and names of the classes.

    `solo-ext data convert` writes them; of shards of others all are read once.
    """
    storage, mine = images.storage, own / TARGETS
    if classes is not None and not storage.remote:
        return storage.folder / TARGETS, classes
    own.mkdir(parents=True, exist_ok=True)
    if classes is not None:
        if not mine.exists():
            content = storage.read(TARGETS)
            atomic_write(mine, lambda scratch: scratch.write_bytes(content))
        return mine, classes
    column = _column(images.shards[0], "label", storage.settings.label)
    names = own / f"{column}.json"
    mine = own / f"{column}.npy"
    with locked(own / "labels.lock"):
        if not names.exists():
            encoding, _ = images.shards[0].columns[column]
            values = [_label(images.value(i, column), encoding) for i in range(len(images))]
            known = sorted({v for v in values if isinstance(v, str) or v >= 0})
            numbers = {value: number for number, value in enumerate(known)}
            targets = np.array([numbers.get(value, -1) for value in values], dtype=np.int32)
            atomic_write(mine, lambda scratch: save_targets(scratch, targets))
            text = json.dumps([str(value) for value in known])
            atomic_write(names, lambda scratch: scratch.write_text(text))
    return mine, json.loads(names.read_text())


def _label(value: bytes, encoding: str) -> Any:
    if encoding in _NUMBERS:
        return int(np.frombuffer(value, _NUMBERS[encoding])[0])
    return int(value) if encoding == "str_int" else value.decode()


def save_targets(file: Path, targets: NDArray[np.int32]) -> None:
    """Writes targets (n,) whatever the file is called.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "targets"
    >>> save_targets(file, np.array([2, 0], dtype=np.int32))
    >>> np.load(file).tolist()
    [2, 0]
    """
    with file.open("wb") as opened:
        np.save(opened, targets)
