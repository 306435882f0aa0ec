"""Image files: class folders, folders without classes, or a text file that lists them.

Hidden files and folders, whose names begin with a dot, are passed over: macOS leaves a file
``._name`` beside every image that it writes to a disk of another system or a zip archive.

Their paths are kept in arrays: a list of pairs would take 180 bytes per image in every process. The
arrays of more than :data:`~solo_ext.core.draws.LARGE` images are written to the cache folder once,
and every process of a machine maps the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets.folder import IMG_EXTENSIONS

from solo_ext.core import draws
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.files import cache_root, locked, writing
from solo_ext.data.reading import EncodedImages, read_file

Sample = tuple[str, int]
_Seen = dict[str, list[int]]
"""Inode and timestamps of every folder or file that a listing was made from, by path."""


class _Found:
    """What a walk adds to while it yields samples: what it has read, classes, hidden images."""

    def __init__(self) -> None:
        self.seen, self.classes, self.hidden = _Seen(), list[str](), 0


_Walk = Callable[[_Found], Iterable[Sample]]
_BLOCK = 64
"""Only the position of every 64th name is kept; a name is found by splitting its block of 64."""
_FLUSH_EVERY = 2**20
_SETTLED = 2_000_000_000
"""Nanoseconds after which another change of a folder is sure to get another timestamp."""
_FILES = "names", "starts", "targets"
_FEWEST_OF_A_CLASS, _MOST_CLASSES = 10, 1000
_SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing", "unlabeled")
_DATE = re.compile(r"(19|20)\d\d([-_. ]?\d\d){0,2}")
_LABELLED = re.compile(r"(.*?)[ \t]+([^ \t]+)")
_NUMBER = re.compile(r"0|-?[1-9]\d{0,5}")
"""Labels of this form are class numbers, if all labels of a list have it."""
_DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class ImageFiles(EncodedImages):
    """Image files and their targets; ``samples`` has the path and target of each.

    Attributes:
        hidden: number of image files that were passed over because they are hidden.

    >>> files = ImageFiles(Listing.of([("ant/0.png", 0), ("bee/0.png", 1)], ["ant", "bee"]))
    >>> len(files), files.targets.tolist()
    (2, [0, 1])
    """

    def __init__(self, samples: Listing) -> None:
        self.samples, self.classes, self.hidden = samples, samples.classes, samples.hidden

    @property
    def targets(self) -> NDArray[np.int32]:  # type: ignore[override]
        return self.samples.targets

    def encoded(self, index: int) -> bytes:
        return read_file(self.name_of(index))

    def name_of(self, index: int) -> str:
        return str(self.samples[index][0])


@dataclass(eq=False)
class Listing(Sequence[Sample]):
    """Path and target of every image.

    >>> listing = Listing.of([("ant/0.png", 0), ("bee/0.png", 1)], ["ant", "bee"])
    >>> len(listing), listing[1], listing.targets.tolist()
    (2, ('bee/0.png', 1), [0, 1])
    """

    prefix: str  # folder that relative names start from
    names: NDArray[np.uint8]  # (B,) bytes of all names, each followed by a zero
    starts: NDArray[np.int64]  # (ceil(n / 64) + 1,) where every 64th name begins, and B
    targets: NDArray[np.int32]  # (n,)
    classes: list[str]
    folder: Path | None = None  # folder of the mapped arrays; None if in memory
    digest: str | None = None  # hash of a mapped listing
    hidden: int = 0  # image files that were passed over

    @classmethod
    def of(cls, samples: Iterable[Sample], classes: list[str], prefix: str = "") -> Listing:
        """Puts samples into arrays of this process."""
        arrays = _ListingBuilder(prefix)
        for sample in samples:
            arrays.add(*sample)
        return arrays.listing(classes)

    @classmethod
    def mapped(cls, folder: Path, prefix: str = "", digest: str | None = None) -> Listing:
        """Maps the listing in a folder, which must have ``digest`` if that is given.

        Raises:
            OSError, ValueError: the listing is missing or incomplete.
            UserError: the listing has another digest.
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
        found, hidden = about["digest"], about.get("hidden", 0)
        return cls(prefix, names, starts, targets, about["classes"], folder, found, hidden)

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


class _ListingBuilder:
    """Builds a listing: in memory, or in ``files`` as soon as they are set."""

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
        if self.files and self.count % _FLUSH_EVERY == 0:
            self.flush()

    def flush(self) -> None:
        """Moves the arrays in memory to the ends of the files."""
        for held, file, digest in zip(self.held, self.files, self.hashes, strict=True):
            file.write(held)
            digest.update(held)
            del held[:]

    def listing(self, classes: list[str], hidden: int = 0) -> Listing:
        names, starts, targets = self.held
        starts.append(self.size)
        arrays = np.frombuffer(names, np.uint8), np.array(starts), np.array(targets, np.int32)
        return Listing(self.prefix, *arrays, classes, hidden=hidden)


def _listed(roots: Sequence[Path], kind: str, walk: _Walk) -> ImageFiles:
    """Lists images, or maps their cached listing if nothing that it was made from has changed.

    A folder counts as changed if its inode or timestamps differ, as they do after anything in it
    was added, removed or renamed.
    """
    prefix = ""
    if len(roots) == 1:
        root = roots[0]
        prefix = str((root.parent if root.is_file() else root) / "x")[:-1]
    places = "\n".join(str(root.absolute()) for root in roots)
    name = hashlib.sha256(os.fsencode(f"{kind}\n{places}")).hexdigest()[:32]
    folder = cache_root() / "listings" / name
    if found := _unchanged(folder, prefix):
        return ImageFiles(found)
    arrays, about = _ListingBuilder(prefix), _Found()
    with contextlib.ExitStack() as stack:
        for sample in walk(about):
            if arrays.count == draws.LARGE:
                stack.enter_context(writing(folder))
                folder.parent.mkdir(parents=True, exist_ok=True)
                # The other processes wait here, and then find what the first has written.
                stack.enter_context(locked(folder.with_suffix(".lock")))
                if found := _unchanged(folder, prefix):
                    return ImageFiles(found)
                for left in folder.parent.glob(f".{name}.*.saving"):
                    # A process that was killed left it.
                    shutil.rmtree(left)
                scratch = folder.with_name(f".{name}.{socket.gethostname()}-{os.getpid()}.saving")
                stack.callback(shutil.rmtree, scratch, ignore_errors=True)
                scratch.mkdir()
                arrays.files = [stack.enter_context(open(scratch / n, "wb")) for n in _FILES]
            arrays.add(*sample)
        if not arrays.files:
            return ImageFiles(arrays.listing(about.classes, about.hidden))
        arrays.held[1].append(arrays.size)
        arrays.flush()
        for file in arrays.files:
            file.flush()
            os.fsync(file.fileno())
        digests = [*(digest.hexdigest() for digest in arrays.hashes), *about.classes]
        digest = hashlib.sha256("\n".join(digests).encode(errors="surrogateescape")).hexdigest()
        held = {"count": arrays.count, "digest": digest, **vars(about)}
        (scratch / "about.json").write_text(json.dumps(held))
        # Processes that have mapped the old listing can still read its removed files.
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        return ImageFiles(Listing.mapped(folder, prefix))


def _unchanged(folder: Path, prefix: str) -> Listing | None:
    """The listing in a folder; ``None`` if anything that it was made from has changed."""
    try:
        seen = json.loads((folder / "about.json").read_text())["seen"]
        if any(state != _state(path) for path, state in seen.items()):
            return None
        return Listing.mapped(folder, prefix)
    except (OSError, ValueError):
        return None


def _note(seen: _Seen, path: str | os.PathLike[str]) -> None:
    """Records the state of a folder or file that is about to be read."""
    state = _state(path)
    # After a recent change record nothing: the next change could have the same timestamp.
    settled = time.time_ns() - max(state[1:]) > _SETTLED
    seen[os.path.abspath(path)] = state if settled else []


def _state(path: str | os.PathLike[str]) -> list[int]:
    held = os.stat(path)
    return [held.st_ino, held.st_mtime_ns, held.st_ctime_ns]


def unlabelled_folders(roots: Sequence[Path], key: str) -> ImageFiles:
    """All images below folders, at any depth, in the order of the folders and then of the paths.

    Their target is -1. Links to folders are followed. ``key`` is the config key of the paths.

    Raises:
        ConfigError: a link leads to a folder that it lies in, or a folder lies in another.
        OSError: a folder cannot be read.

    >>> from solo_ext.data.digits import digits_folder
    >>> images = unlabelled_folders([digits_folder("train"), digits_folder("val")], "train_path")
    >>> len(images), images[0][1]
    (1797, -1)
    """
    real = [root.resolve() for root in roots]
    for one, inner in itertools.permutations(range(len(roots)), 2):
        if real[inner].is_relative_to(real[one]):
            problem = f"it lies in {str(roots[one])!r}, whose images include its own"
            if real[inner] == real[one]:
                problem = "it is named twice"
            raise ConfigError(key, str(roots[inner]), problem, "name each folder once")

    def walk(found: _Found) -> Iterator[Sample]:
        for root in roots:
            yield from ((file, -1) for file in _images_below(root, root, key, found))

    return _listed(roots, "tree", walk)


def class_folders(root: Path, key: str) -> ImageFiles:
    """The images of a folder of class folders, in torchvision's order and numbering.

    An image in a subfolder of a class folder belongs to the class; links to folders are followed.
    ``key`` is the path's config key.

    Raises:
        ConfigError: there is no class folder, one has no image, all have names of splits, or a link
            leads to a parent of it.
        OSError: a folder cannot be read.

    >>> from solo_ext.data.digits import digits_folder
    >>> images = class_folders(digits_folder("val"), "data.val_path")
    >>> len(images), images.classes[:3], images[0][0].size
    (397, ['0', '1', '2'], (32, 32))
    """

    def walk(found: _Found) -> Iterator[Sample]:
        _note(found.seen, root)
        classes = found.classes
        folders = (p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        classes += sorted(p.name for p in folders)
        if classes and all(name.lower() in _SPLITS for name in classes):
            named = " and ".join(map(repr, classes))
            problem = f"its folders {named} are splits, and would be its classes"
            raise ConfigError(
                key, str(root), problem, f"name one, such as {str(root / classes[0])!r}"
            )
        empty = []
        for target, name in enumerate(classes):
            file = None
            for file in _images_below(root / name, root, key, found):
                yield file, target
            if file is None:
                empty.append(name)
        if empty:
            problem = f"no image in {len(empty)} of its class folders, the first {empty[0]!r}"
            raise ConfigError(key, str(root), problem, "remove it or fill it")
        if not classes:
            remedy = (
                "lay the images out as <class>/<image>, or set data.no_labels=true for training"
            )
            raise ConfigError(key, str(root), "no class folders in it", remedy)

    return _listed([root], "classes", walk)


def are_plainly_classes(root: Path) -> bool:
    """Whether the folders in a folder are classes beyond doubt.

    That is two folders or more and nothing but folders, each with ten images or more and no folder
    in it, and not all of them named like dates or like splits (``train``, ``val``).

    >>> from solo_ext.data.digits import digits_folder
    >>> digits = digits_folder("train")
    >>> are_plainly_classes(digits), are_plainly_classes(digits / "0")
    (True, False)
    """
    if not root.is_dir():
        return False
    shown = _shown(root)
    folders = [entry for entry in shown if entry.is_dir()]
    if not 2 <= len(folders) <= _MOST_CLASSES or any(map(_is_image, shown)):
        return False
    if all(_DATE.fullmatch(f.name) or f.name.lower() in _SPLITS for f in folders):
        return False
    for folder in folders:
        inner = _shown(folder.path)
        if (
            any(entry.is_dir() for entry in inner)
            or sum(map(_is_image, inner)) < _FEWEST_OF_A_CLASS
        ):
            return False
    return True


def _shown(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    with os.scandir(os.fspath(folder)) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(IMG_EXTENSIONS)


def _images_below(folder: Path, root: Path, key: str, found: _Found) -> Iterator[str]:
    """Image files below a folder, folder by folder, in the order of their paths."""
    _refuse_circle(folder, root, key)
    _note(found.seen, folder)
    places = []
    for place, folders, files in os.walk(folder, onerror=_fail, followlinks=True):
        # `os.walk` does not enter what is removed from its list.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            _refuse_circle(Path(place, name), root, key)
            _note(found.seen, os.path.join(place, name))
        images = [f for f in files if f.lower().endswith(IMG_EXTENSIONS)]
        shown = sorted(f for f in images if not f.startswith("."))
        found.hidden += len(images) - len(shown)
        places.append((place, shown))
    for place, files in sorted(places):
        yield from (os.path.join(place, file) for file in files)


def _refuse_circle(folder: Path, root: Path, key: str) -> None:
    """Refuses a link to a parent folder of the link, which would make the walk endless."""
    if not folder.is_symlink():
        return
    target = folder.resolve()
    above = (place for place in folder.parents if place.is_relative_to(root))
    if any(place.resolve().is_relative_to(target) for place in above):
        problem = f"{str(folder)!r} is a link to a folder that it lies in, without end"
        raise ConfigError(key, str(root), problem, "remove the link")


def _fail(error: OSError) -> None:
    raise error


def file_list(file: Path, key: str, labelled: bool, *, present: bool) -> ImageFiles:
    """The images in a text file with one line ``path label`` each, in its order.

    Paths are absolute or relative to the list's folder, and may contain spaces. Labels are whole
    numbers up to 999,999, of which negative ones mean no label (-1), or names, which are numbered
    in sorted order; a list of other numbers is refused. Empty lines and lines that begin with ``#``
    are ignored. Without ``labelled``, lines have no label. With ``present``, a line that names a
    missing file is refused.

    Raises:
        ConfigError: the file is not such a list, or names a file that does not exist.
        OSError: the list cannot be read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "list.txt"
    >>> size = file.write_text("a.png cat" + chr(10) + "b.png ant" + chr(10))
    >>> images = file_list(file, "data.train_path", True, present=False)
    >>> images.classes, images.targets.tolist()
    (['ant', 'cat'], [1, 0])
    """

    def refusal(problem: str) -> ConfigError:
        remedy = "give a folder, or a text file with a line `path label` for every image"
        return ConfigError(key, str(file), problem, remedy)

    def lines(check: bool) -> Iterator[tuple[Path, str]]:
        # `str.splitlines` would also split at characters that file names may contain.
        with file.open(encoding="utf-8-sig") as text:
            for number, line in enumerate(map(str.strip, text), 1):
                if not line or line.startswith("#"):
                    continue
                name, label = line, "-1"
                if labelled:
                    # `str.rsplit` would also split at other spaces than these two, as U+00A0.
                    found = _LABELLED.fullmatch(line)
                    name, label = found.groups() if found else ("", line)
                if not name:
                    raise refusal(f"line {number} has no label")
                path = file.parent / name
                if check and present and not os.path.isfile(path):
                    raise refusal(f"line {number} names {name[:200]!r}, which is no file")
                yield path, label

    def walk(found: _Found) -> Iterator[Sample]:
        _note(found.seen, file)
        try:
            # Read the list twice: labels can be numbered only once all of them are known.
            labels = dict.fromkeys(label for _, label in lines(check=True))
        except UnicodeDecodeError:
            raise refusal("a file that is no text") from None
        try:
            targets, names = parse_text_labels(labels)
        except ValueError as error:
            raise refusal(str(error)) from None
        found.classes += names
        yield from ((str(path), targets[label]) for path, label in lines(check=False))

    kind = f"list, labelled={labelled}, present={present}"
    return _listed([file], kind, walk)


def list_has_labels(file: Path) -> bool:
    """Whether the first line of a list is no path as a whole, and so one of ``path label``.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "list.txt"
    >>> _ = file.write_text("a.png cat")
    >>> list_has_labels(file)
    True
    """
    with contextlib.suppress(OSError, UnicodeDecodeError), file.open(encoding="utf-8-sig") as text:
        lines = (line.strip() for line in text)
        first = next((line for line in lines if line and not line.startswith("#")), "")
        return bool(_LABELLED.fullmatch(first)) and not (file.parent / first).is_file()
    return False


def parse_text_labels(labels: Collection[str]) -> tuple[dict[str, int], list[str]]:
    """Targets by label, and names of the classes.

    Whole numbers are targets, where a negative one means no label (-1); names are numbered in
    sorted order.

    Raises:
        ValueError: all labels are numbers, but not all of them are class numbers.

    >>> parse_text_labels(["2", "-7"])
    ({'2': 2, '-7': -1}, ['0', '1', '2'])
    >>> parse_text_labels(["2", "cat"])
    ({'2': 0, 'cat': 1}, ['2', 'cat'])
    """
    odd = next((label for label in labels if not _NUMBER.fullmatch(label)), None)
    if odd is None:
        targets = {label: max(int(label), -1) for label in labels}
        return targets, list(map(str, range(max(targets.values(), default=-1) + 1)))
    if all(map(_DECIMAL.fullmatch, labels)):
        raise ValueError(
            f"label {odd[:200]!r} is neither a number up to 999999 without leading zeros nor a name"
        )
    classes = sorted(labels)
    return {name: number for number, name in enumerate(classes)}, classes
