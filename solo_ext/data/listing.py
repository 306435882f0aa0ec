"""Paths and targets of image files in arrays, which processes share where they are many.

A list of pairs takes 180 bytes per image in every process; a :class:`Listing` takes the characters
of the names and four bytes. Of more than :data:`~solo_ext.core.draws.LARGE` images it is written to
the cache folder once, and every process of a machine maps the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solo_ext.core import draws
from solo_ext.core.errors import UserError
from solo_ext.core.files import cache_root, locked, writing

Sample = tuple[str, int]
Seen = dict[str, list[int]]
"""State of every folder or file that a listing was made of, by path."""
Walk = Callable[[Seen, list[str]], Iterable[Sample]]
"""Yields the samples; notes what it reads in the first, and the names of classes in the second."""
_BLOCK = 64
"""Names that are searched for one: only the place of every 64th is kept."""
_AT_ONCE = 2**20
_SETTLED = 2_000_000_000
"""Nanoseconds after which another change of a folder surely has another time."""


class Listing(Sequence[Sample]):
    """Path and target of every image.

    Args:
        prefix: what relative names are below.
        names: (B,) their characters, each name ended by a zero.
        starts: (ceil(n / 64) + 1,) where every 64th name begins, and B.
        targets: (n,).
        classes: names of the classes.
        folder: where the arrays are mapped from.
        digest: of names and targets, for a mapped listing.

    >>> listing = Listing.of([("ant/0.png", 0), ("bee/0.png", 1)], ["ant", "bee"])
    >>> len(listing), listing[1], listing.targets.tolist()
    (2, ('bee/0.png', 1), [0, 1])
    """

    def __init__(
        self,
        prefix: str,
        names: NDArray[np.uint8],
        starts: NDArray[np.int64],
        targets: NDArray[np.int32],
        classes: list[str],
        folder: Path | None = None,
        digest: str | None = None,
    ) -> None:
        self.prefix, self.names, self.starts, self.targets = prefix, names, starts, targets
        self.classes, self.folder, self.digest = classes, folder, digest

    @classmethod
    def of(cls, samples: Iterable[Sample], classes: list[str], prefix: str = "") -> Listing:
        """The samples in arrays of this process."""
        arrays = _Arrays(prefix)
        for sample in samples:
            arrays.add(*sample)
        return arrays.listing(classes)

    @classmethod
    def mapped(cls, folder: Path, prefix: str = "", digest: str | None = None) -> Listing:
        """Maps what :func:`open_listing` wrote; ``digest`` if it has to be that listing.

        Raises:
            OSError, ValueError: it is not there, or not whole.
            UserError: it is another one.
        """
        about = json.loads((folder / "about.json").read_text())
        # Copy on write, because torch warns of arrays that cannot be written to.
        kinds = np.uint8, np.int64, np.int32
        arrays = [np.memmap(folder / n, k, "c") for n, k in zip(_FILES, kinds, strict=True)]
        names, starts, targets = arrays
        if len(targets) != about["count"] or len(names) != starts[-1]:
            raise ValueError(f"{folder}: not whole")
        if digest not in (None, about["digest"]):
            raise UserError("the folder of the images has changed since this run began; restart it")
        return cls(prefix, names, starts, targets, about["classes"], folder, about["digest"])

    def __reduce__(self) -> Any:
        if self.folder is None:
            return super().__reduce__()
        # Pickled by value, the mapped arrays would be copied to every worker.
        return Listing.mapped, (self.folder, self.prefix, self.digest)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        return self._path(self._block(place // _BLOCK)[place % _BLOCK]), int(self.targets[place])

    def __iter__(self) -> Iterator[Sample]:
        for block in range(len(self.starts) - 1):
            targets = self.targets[block * _BLOCK : (block + 1) * _BLOCK].tolist()
            yield from zip(map(self._path, self._block(block)), targets, strict=True)

    def _block(self, block: int) -> list[bytes]:
        names = self.names[self.starts[block] : self.starts[block + 1]]
        return names.tobytes().split(b"\0")[:-1]

    def _path(self, name: bytes) -> str:
        # Names that are not below the prefix are absolute, and `join` leaves these alone.
        return os.path.join(self.prefix, os.fsdecode(name))


class _Arrays:
    """A listing that grows in memory, and once it has files in these."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.count, self.size = prefix, 0, 0
        self.held = bytearray(), array("q"), array("i")
        self.files: list[Any] = []
        self.hashes: list[Any] = [hashlib.sha256() for _ in self.held]

    def add(self, path: str, target: int) -> None:
        names, starts, targets = self.held
        if self.count % _BLOCK == 0:
            starts.append(self.size)
        name = os.fsencode(path.removeprefix(self.prefix)) + b"\0"
        names += name
        targets.append(target)
        self.count, self.size = self.count + 1, self.size + len(name)
        if self.files and self.count % _AT_ONCE == 0:
            self.flush()

    def flush(self) -> None:
        """Moves what is in memory to the files."""
        for held, file, digest in zip(self.held, self.files, self.hashes, strict=True):
            file.write(held)
            digest.update(held)
            del held[:]

    def listing(self, classes: list[str]) -> Listing:
        names, starts, targets = self.held
        starts.append(self.size)
        arrays = np.frombuffer(names, np.uint8), np.array(starts), np.array(targets, np.int32)
        return Listing(self.prefix, *arrays, classes)


_FILES = "names", "starts", "targets"


def open_listing(root: Path, prefix: str, kind: str, walk: Walk) -> Listing:
    """Lists images, or maps their listing of before if nothing that was read has changed.

    A folder has changed if its time of change, or the folder itself, is another; that is so after
    anything in it was added, removed or renamed.

    Args:
        root: what is listed.
        prefix: path that most samples begin with.
        kind: of listing; another kind has another listing.
        walk: lists it.

    Raises:
        OSError: the listing of many images cannot be written.

    >>> def walk(seen, classes):
    ...     classes += ["ant", "bee"]
    ...     yield from [("data/ant/0.png", 0), ("data/bee/0.png", 1)]
    >>> listing = open_listing(Path("data"), "data/", "example", walk)
    >>> list(listing), listing.classes
    ([('data/ant/0.png', 0), ('data/bee/0.png', 1)], ['ant', 'bee'])
    """
    name = hashlib.sha256(os.fsencode(f"{kind}\n{root.absolute()}")).hexdigest()[:32]
    folder = cache_root() / "listings" / name
    found = _unchanged(folder, prefix)
    if found is not None:
        return found
    arrays, seen, classes = _Arrays(prefix), Seen(), list[str]()
    with contextlib.ExitStack() as stack:
        for sample in walk(seen, classes):
            if arrays.count == draws.LARGE:
                stack.enter_context(writing(folder))
                folder.parent.mkdir(parents=True, exist_ok=True)
                # The other processes wait here, and find what the first has written.
                stack.enter_context(locked(folder.with_suffix(".lock")))
                found = _unchanged(folder, prefix)
                if found is not None:
                    return found
                for left in folder.parent.glob(f".{name}.*.saving"):
                    # A process that was killed left it.
                    shutil.rmtree(left)
                scratch = folder.with_name(f".{name}.{socket.gethostname()}-{os.getpid()}.saving")
                stack.callback(shutil.rmtree, scratch, ignore_errors=True)
                scratch.mkdir()
                arrays.files = [stack.enter_context(open(scratch / n, "wb")) for n in _FILES]
            arrays.add(*sample)
        if not arrays.files:
            return arrays.listing(classes)
        arrays.held[1].append(arrays.size)
        arrays.flush()
        for file in arrays.files:
            file.flush()
            os.fsync(file.fileno())
        digests = [*(digest.hexdigest() for digest in arrays.hashes), *classes]
        digest = hashlib.sha256("\n".join(digests).encode(errors="surrogateescape")).hexdigest()
        about = {"count": arrays.count, "digest": digest, "classes": classes, "seen": seen}
        (scratch / "about.json").write_text(json.dumps(about))
        # Who has mapped the listing of before keeps its files.
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        return Listing.mapped(folder, prefix)


def _unchanged(folder: Path, prefix: str) -> Listing | None:
    """The listing in a folder, if what it was made of is as it was."""
    try:
        seen = json.loads((folder / "about.json").read_text())["seen"]
        if any(state != _state(path) for path, state in seen.items()):
            return None
        return Listing.mapped(folder, prefix)
    except (OSError, ValueError):
        return None


def note(seen: Seen, path: str | os.PathLike[str]) -> None:
    """Notes the state of a folder or file that is about to be read.

    >>> seen = {}
    >>> note(seen, "/")
    >>> list(seen)
    ['/']
    """
    state = _state(path)
    # A change at the same tick of the clock would go unseen.
    settled = time.time_ns() - max(state[1:]) > _SETTLED
    seen[os.path.abspath(path)] = state if settled else []


def _state(path: str | os.PathLike[str]) -> list[int]:
    held = os.stat(path)
    return [held.st_ino, held.st_mtime_ns, held.st_ctime_ns]
