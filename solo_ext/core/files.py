"""Files: where configs and data lie, how one is written whole, lines of JSON, locks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from solo_ext.core.errors import UserError, disk_errno


def config_root() -> Path:
    """Folder that holds ``solo_ext/<dataset>/<method>.yaml``.

    A wheel carries it inside the package; an editable install reads it from the checkout.

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
    """Whether there is such a file; none has a name that the system cannot have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def refuse_link(path: Path) -> Path:
    """The path of a file that is about to be written where it is, which is no link.

    A folder from someone else may hold links to files of the user's.

    Raises:
        UserError: it is one.
    """
    if path.is_symlink():
        raise UserError(
            f"{str(path)!r} is a link to {str(path.resolve())!r}, which would be written; remove it"
        )
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names a file in the error of a disk that does not take it.

    Args:
        path: of the file; what writes through a handle or a library does not say it, or says that
            of a temporary one.

    Raises:
        OSError: in place of the library's error, too.
    """
    try:
        yield
    except Exception as error:
        number = disk_errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a whole file or none of it; several processes may write the same one.

    Args:
        path: its folder exists.
        write: called with the path of a file to write, which then takes the place of ``path``.
    """
    # The host too: processes of several may share the folder.
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.saving")
    try:
        # A link of that name would be written through.
        scratch.unlink(missing_ok=True)
        with writing(path):
            write(scratch)
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """As :func:`atomic_write`; a crash of the machine leaves the old text or the new one."""

    def write(scratch: Path) -> None:
        with scratch.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    atomic_write(path, write)


def append_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Adds lines; what a killed process left half written is removed first.

    Args:
        file: made where it is missing; its folder exists.
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
    """The objects of a file, those lines passed over that hold none; none without a file."""
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
    """No other process is in a block of the same file.

    Args:
        file: of the lock, made where it is missing; its folder exists.
        wait: seconds to wait for another process; below 0 for ever.

    Raises:
        UserError: another process is still there, or the file is a link.
    """
    lock = FileLock(refuse_link(file))
    try:
        lock.acquire(wait)
    except Timeout:
        raise UserError(
            f"{str(file.parent)!r} is being written by another process; wait for it, or name "
            "another folder"
        ) from None
    except NotImplementedError:
        # Some network file systems have no locks; writing there by two at once is up to the user.
        yield
        return
    try:
        yield
    finally:
        lock.release()
