"""Images in shards (files of many images), in a folder or copied from S3 or GCS on demand.

The formats of shards are in ``streaming`` and ``webdataset``, which open them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from solo_ext.config.schema import Streaming
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import atomic_write, cache_root, locked, open_regular
from solo_ext.data.reading import (
    NOT_THE_IMAGES_FAULT,
    EncodedImages,
    StorageUnavailable,
    UnreadableImage,
)

TARGETS = "targets.npy"
KEY = "data.streaming"
_LONGEST = 300
"""Most characters that are shown of a storage's own message."""
_MISSING = "the shard is not there"


@dataclass(frozen=True)
class Shard:
    """A file of images as its index describes it; ``hashes`` are hex digests by algorithm.

    >>> Shard("shard.00000.mds", 3, 1, {}).wrong(b"cut")
    >>> Shard("shard.00000.mds", 3, 1, {"sha1": "0"}).wrong(b"cut")
    'the shard is damaged: its sha1 is not that in the index'
    """

    name: str
    size: int
    samples: int
    hashes: Mapping[str, str]

    def wrong(self, content: bytes) -> str | None:
        """What is wrong with the content of its file; ``None`` if it matches the index."""
        if len(content) != self.size:
            return f"the shard has {len(content)} bytes, and {self.size} in the index"
        for algorithm, digest in self.hashes.items():
            comparable = algorithm in hashlib.algorithms_guaranteed
            if comparable and hashlib.new(algorithm, content).hexdigest() != digest:
                return f"the shard is damaged: its {algorithm} is not that in the index"
        return None

    def value(self, file: BinaryIO, place: int, column: str) -> bytes:
        """The bytes of one column of the sample at ``place``.

        Raises:
            ValueError: the file is damaged.
        """
        # A plain Shard is only downloaded and checked; MDS and Tar know their format.
        raise NotImplementedError


class Storage:
    """A folder of shards, local or copied from ``s3://bucket/folder`` or ``gs://bucket/folder``.

    All processes share one folder of copies, and each shard is downloaded once. To make room, a
    process removes the copies that were opened longest ago.

    >>> Storage("shards", Streaming()).remote, Storage("s3://bucket/shards", Streaming()).remote
    (False, True)
    """

    def __init__(self, root: str, settings: Streaming) -> None:
        self.remote = "://" in root
        self.root = (root if self.remote else os.path.expanduser(root)).rstrip("/") or "/"
        self.settings, self.folder = settings, Path(self.root)
        self.limit = settings.cache_limit if self.remote else None
        self._files: tuple[int, Any] | None = None
        self._lost: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None, "_lost": {}}

    def read(self, name: str) -> bytes:
        """Reads a file of the folder, local or remote.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the storage does not respond, or refuses.
        """
        if not self.remote:
            with open_regular(Path(self.root) / name) as opened:
                return opened.read()
        with self._opened().open_input_stream(f"{self.root.partition('://')[2]}/{name}") as file:
            return bytes(file.read())

    def listing(self) -> dict[str, tuple[int, int]]:
        """Size and modification time of every file, by name; (-1, -1) for a dangling link."""
        if not self.remote:
            return {name: _state(Path(self.root, name)) for name in os.listdir(self.root)}
        files = self._opened()
        from pyarrow import fs

        found = files.get_file_info(fs.FileSelector(self.root.partition("://")[2]))
        return {f.base_name: (f.size, f.mtime_ns or 0) for f in found if f.is_file}

    def open(self, shard: Shard) -> BinaryIO:
        """Opens a shard, and first downloads it if there is no local copy.

        Raises:
            ValueError: the shard is missing or damaged.
            StorageUnavailable: the storage does not respond.
        """
        if shard.name in self._lost:
            raise ValueError(self._lost[shard.name])
        file = self._held(shard)
        if file is None and not self.remote:
            raise ValueError(_MISSING)
        return self._downloaded(shard) if file is None else file

    def _held(self, shard: Shard) -> BinaryIO | None:
        """Opens the file of a shard; ``None`` if it is missing, or if a copy is incomplete."""
        try:
            file = open_regular(self.folder / shard.name)
        except FileNotFoundError:
            return None
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
            raise ValueError(f"the shard has {size} bytes, and {shard.size} in the index")
        return None

    def _downloaded(self, shard: Shard) -> BinaryIO:
        with locked(self.folder / f".{shard.name}.lock"):
            file = self._held(shard)
            if file is not None:
                # Another process was first.
                return file
            for left in self.folder.glob(f".{shard.name}.*.saving"):
                # A process that was killed left it.
                left.unlink(missing_ok=True)
            content = self._fetch_verified(shard)
            with self._room(shard.size):
                atomic_write(self.folder / shard.name, lambda scratch: scratch.write_bytes(content))
                file = self._held(shard)
        assert file is not None
        return file

    def _fetch_verified(self, shard: Shard) -> bytes:
        """Downloads a shard, and notes one that is missing or damaged, so that it is asked once."""
        try:
            content = self.read(shard.name)
        except FileNotFoundError:
            wrong: str | None = _MISSING
        except OSError as error:
            # If this were skipped, every sample would be left out until the storage is back.
            raise StorageUnavailable(
                f"{self.root}/{shard.name}: {_said(error)}; look at the connection and the "
                "credentials"
            ) from None
        else:
            wrong = shard.wrong(content)
        if wrong is None:
            return content
        self._lost[shard.name] = wrong
        raise ValueError(wrong)

    @contextlib.contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Removes copies until a new one fits; no other process removes any until it is opened."""
        # Copies of an earlier index of this address count too.
        of_address = self.folder.parents[1]
        with locked(of_address / "room.lock"):
            if self.limit is not None:
                self._remove(of_address, self.limit - size)
            yield

    def _remove(self, of_address: Path, most: int) -> None:
        """Removes the copies that were opened longest ago, until the others fit into ``most``."""
        files = of_address.glob("*/shards/*")
        copies = [(f.stat(), f) for f in files if f.suffix not in (".lock", ".saving")]
        held = sorted((state.st_mtime_ns, state.st_size, file) for state, file in copies)
        over = sum(size for _, size, _ in held) - most
        for _, size, file in held:
            if over <= 0:
                break
            file.unlink(missing_ok=True)
            over -= size

    def _opened(self) -> Any:
        """This process's own connection: after a fork, the one of the parent cannot be used."""
        if self._files is None or self._files[0] != os.getpid():
            self._files = os.getpid(), _file_system(self.root, self.settings)
        return self._files[1]


def _state(file: Path) -> tuple[int, int]:
    try:
        state = file.stat()
    except FileNotFoundError:
        # This is a dangling link.
        return -1, -1
    return state.st_size, state.st_mtime_ns


def _file_system(root: str, settings: Streaming) -> Any:
    from pyarrow import fs

    scheme, _, place = root.partition("://")
    timeout, named = settings.download_timeout, dict[str, Any](anonymous=settings.anonymous)
    if scheme == "gs":
        return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=timeout), **named)
    if scheme != "s3":
        raise OSError(f"{scheme}:// is not known, only s3:// and gs://")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
    if endpoint:
        named["endpoint_override"] = endpoint
    elif not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ):
        named["region"] = fs.resolve_s3_region(place.partition("/")[0])
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=1 + settings.download_retry)
    timeouts = {"connect_timeout": timeout, "request_timeout": timeout}
    return fs.S3FileSystem(retry_strategy=retries, **timeouts, **named)


def _said(error: OSError) -> str:
    said = (error.strerror or str(error).strip() or type(error).__name__).splitlines()[0]
    # Google's messages are long, because they repeat themselves.
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."


class MappedArray:
    """An array in a ``.npy`` file, which each process memory-maps on first use.

    >>> import pickle, tempfile
    >>> file = Path(tempfile.mkdtemp()) / "targets.npy"
    >>> write_array(file, np.array([2, 0], dtype=np.int32))
    >>> pickle.loads(pickle.dumps(MappedArray(file))).values.tolist()
    [2, 0]
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return MappedArray, (self.file,)

    @functools.cached_property
    def values(self) -> NDArray[Any]:
        """The memory-mapped array.

        Raises:
            OSError, ValueError: the file is missing or damaged.
        """
        # Copy on write, because torch warns of arrays that cannot be written to.
        array: NDArray[Any] = np.load(self.file, mmap_mode="c", allow_pickle=False)
        return array


class ShardedImages(EncodedImages):
    """Images in one column of shards; sample i is the i-th of all shards in order.

    ``shard_starts`` (S + 1,) has the first sample of every shard, and the number of samples;
    ``per_file`` is the number of samples of the largest shard; ``fingerprint`` changes with the
    images and their order.

    >>> shard = Shard("shard.00000.mds", 900, 10, {})
    >>> images = ShardedImages(Storage("shards", Streaming()), [shard] * 3, "image", "")
    >>> len(images), images.name_of(23)
    (30, 'shards/shard.00000.mds, sample 3')
    """

    def __init__(
        self, storage: Storage, shards: Sequence[Shard], column: str, fingerprint: str
    ) -> None:
        self.storage, self.shards, self.column = storage, shards, column
        self.fingerprint = fingerprint
        samples = [shard.samples for shard in shards]
        self.shard_starts = np.concatenate([[0], np.cumsum(samples, dtype=np.int64)])
        self.per_file = max(samples)
        self.classes: list[str] = []
        self._labels: MappedArray | None = None

    def label(self, targets: Path, classes: list[str]) -> None:
        """Sets the targets, from a ``.npy`` file of (n,) int32, and the names of the classes.

        Raises:
            OSError, ValueError: the file is missing, damaged, or not of these shards.
        """
        found = MappedArray(targets)
        if found.values.shape != (len(self),) or found.values.dtype != np.int32:
            raise ValueError(f"{TARGETS} is not of these shards")
        self._labels, self.classes = found, classes
        self.fingerprint = f"{self.fingerprint} {classes}"

    @property
    def targets(self) -> NDArray[np.int32]:  # type: ignore[override]
        """Targets (n,), -1 without labels; the processes of a machine share their memory."""
        unlabelled = np.broadcast_to(np.int32(-1), len(self))
        return unlabelled if self._labels is None else self._labels.values

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    def encoded(self, index: int) -> bytes:
        return self.value(index, self.column)

    def value(self, index: int, column: str) -> bytes:
        """The bytes of a column of a sample.

        Raises:
            UnreadableImage: the sample's shard is missing or damaged.
            StorageUnavailable: the storage does not respond.
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


@contextlib.contextmanager
def storage_errors(key: str, path: str, kind: str, absent: str, remedy: str) -> Iterator[None]:
    """Turns errors of reading a storage into a ``ConfigError`` of ``key``.

    Raises:
        ConfigError: nothing is there, which is reported as ``absent``; the storage does not
            respond; or pyarrow is not installed.

    >>> with storage_errors("data.train_path", "here", "streaming", "no shards", "give a folder"):
    ...     raise FileNotFoundError
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.train_path='here': no shards; give a folder
    """
    try:
        yield
    except ImportError:
        problem, install = "pyarrow is not installed", "pip install 'solo-ext[streaming]'"
        raise ConfigError("data.format", kind, problem, install) from None
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(key, path, absent, remedy) from None
    except OSError as error:
        remedy = "look at the address, the connection and the credentials"
        raise ConfigError(key, path, _said(error), remedy) from None


@contextlib.contextmanager
def cache_errors(settings: Streaming) -> Iterator[None]:
    """Turns errors of writing the cache folder into a ``ConfigError`` of ``cache_dir``.

    >>> with cache_errors(Streaming(cache_dir="/copies")):
    ...     raise PermissionError(13, "Permission denied", "/copies")
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.streaming.cache_dir='/copies': '/copies' cannot be wri...
    """
    try:
        yield
    except OSError as error:
        # These are errors of reading a shard: they name no file, or are the machine's fault.
        if error.filename is None or error.errno in NOT_THE_IMAGES_FAULT:
            raise
        problem = f"{error.filename!r} cannot be written: {error.strerror}"
        remedy = "name a folder with room that can be written, here or in SOLO_EXT_CACHE"
        raise ConfigError(f"{KEY}.cache_dir", settings.cache_dir, problem, remedy) from None


def prepare(storage: Storage, shards: Sequence[Shard], digest: str) -> Path:
    """Returns the cache folder of these shards, and makes a remote storage keep its copies there.

    ``digest`` is that of their index: a new index at the same address may reuse names of shards.

    Raises:
        ConfigError: ``cache_limit`` is too low for the shards.

    >>> storage = Storage("shards", Streaming(cache_dir="copies"))
    >>> prepare(storage, [Shard("shard.00000.mds", 900, 10, {})], "of an index").parents[1]
    PosixPath('copies')
    """
    settings = storage.settings
    most = max(shard.size for shard in shards) * (settings.shuffle_shards + 2)
    if storage.limit is not None and storage.limit < most:
        raise ConfigError(
            f"{KEY}.cache_limit",
            settings.cache_limit,
            f"{KEY}.shuffle_shards={settings.shuffle_shards} of these shards and the next two "
            f"take up to {most / 2**20:.0f} MB",
            "raise the limit, or shuffle fewer shards",
        )
    place = (hashlib.sha256(os.fsencode(text)).hexdigest()[:32] for text in (storage.root, digest))
    own = Path(settings.cache_dir or cache_root() / "shards", *place)
    if storage.remote:
        storage.folder = own / "shards"
        storage.folder.mkdir(parents=True, exist_ok=True)
    return own


def write_array(file: Path, array: NDArray[Any]) -> None:
    """Writes a ``.npy`` file atomically.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "targets.npy"
    >>> write_array(file, np.array([2, 0], dtype=np.int32))
    >>> np.load(file).tolist()
    [2, 0]
    """

    def write(scratch: Path) -> None:
        with scratch.open("wb") as opened:
            np.save(opened, array)

    atomic_write(file, write)
