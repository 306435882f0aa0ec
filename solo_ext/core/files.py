"""Files: folders of configs and data, atomic writes, lines of JSON, locks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from solo_ext.core.errors import UserError, disk_errno

CHECKPOINT_NAME = re.compile(r"-ep=(?P<epoch>\d+)(?:-step=(?P<step>\d+))?\.ckpt$")
"""End of a checkpoint's name: its epoch, and its step if it was saved within the epoch."""


def config_root() -> Path:
    """Folder that holds ``solo_ext/<dataset>/<method>.yaml``.

    A wheel contains it in the package; an editable install reads it from the checkout.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    for root in (package / "configs", package.parent / "configs"):
        if (root / "solo_ext").is_dir():
            return root
    raise FileNotFoundError(
        f"solo_ext's configs are neither in {package} nor beside it; reinstall solo-ext"
    )


def data_root() -> Path:
    """Folder of the data sets: the environment variable ``SOLO_EXT_DATA``, or ``./datasets``."""
    return Path(os.environ.get("SOLO_EXT_DATA", "datasets"))


def is_file(path: Path) -> bool:
    """Whether the file exists; a name that the system does not allow is no error.

    >>> is_file(Path(__file__)), is_file(Path("a" * 5000))
    (True, False)
    """
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def refuse_link(path: Path) -> Path:
    """Returns the path of a file to be written in place, unless it is a link.

    A folder from someone else may hold links to the user's own files.

    Raises:
        UserError: the path is a link.
    """
    if path.is_symlink():
        raise UserError(
            f"{str(path)!r} is a link to {str(path.resolve())!r}, which would be written; remove it"
        )
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Adds the name of a file to the error of a disk that cannot take it.

    Args:
        path: of the file; a library's error names a temporary file or none.

    Raises:
        OSError: instead of the library's error.
    """
    try:
        yield
    except Exception as error:
        number = disk_errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a whole file or none of it; after a crash the file is the old one or the new one.

    Several processes may write the same file.

    Args:
        path: its folder exists.
        write: called with the path of a scratch file to write, which then replaces ``path``.
    """
    # The name includes the host, because processes of several hosts may share the folder.
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.saving")
    try:
        # Remove a link of that name: writing would follow it.
        scratch.unlink(missing_ok=True)
        with writing(path):
            write(scratch)
            _sync(scratch)
            os.replace(scratch, path)
            _sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flushes a file or a folder to the disk; Windows cannot open folders for that."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """As :func:`atomic_write`, for a text.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_text(file, "whole")
    >>> file.read_text()
    'whole'
    """
    atomic_write(path, lambda scratch: scratch.write_text(text))


def append_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Appends lines; first removes a line that a killed process left incomplete.

    Args:
        file: created if missing; its folder exists.
        entries: one line each.

    Raises:
        UserError: the file is a link.
    """
    text = "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries)
    with writing(file), refuse_link(file).open("a+b") as held:
        held.seek(0)
        content = held.read()
        held.truncate(content.rfind(b"\n") + 1)
        held.write(text.encode())
        held.flush()
        os.fsync(held.fileno())


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The objects in a file; skips lines that hold none, and returns none without a file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> append_lines(file, [{"step": 0}, {"step": 1}])
    >>> read_jsonl(file)
    [{'step': 0}, {'step': 1}]
    """
    if not file.is_file():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


@contextlib.contextmanager
def locked(file: Path, wait: float = -1) -> Iterator[None]:
    """Context manager that keeps other processes out of blocks with the same lock file.

    Args:
        file: of the lock, created if missing; its folder exists.
        wait: seconds to wait for another process; below 0 waits forever.

    Raises:
        UserError: another process still holds the lock, or the file is a link.
    """
    lock = FileLock(refuse_link(file))
    try:
        # Some network file systems lack locks; the user then has to keep two runs apart.
        with contextlib.suppress(NotImplementedError):
            lock.acquire(wait)
    except Timeout:
        raise UserError(
            f"{str(file.parent)!r} is being written by another process; wait for it, or name "
            "another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()
