"""Folders of configs and data, reading untrusted files, atomic writes, JSON Lines, locks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, SoftFileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from solo_ext.core.errors import UserError, disk_errno

M = TypeVar("M")
MOST_BYTES = 64 << 20
"""Largest size in bytes of a config or record that is read, far above that of any real one."""
CHECKPOINT_NAME = re.compile(r"-ep=(?P<epoch>\d+)(?:-step=(?P<step>\d+))?\.ckpt$")
"""End of a checkpoint's name: its epoch, and its step if it was saved within the epoch."""


def config_root() -> Path:
    """Folder that holds ``solo_ext/<dataset>/<method>.yaml``.

    >>> (config_root() / "solo_ext" / "digits" / "pcl.yaml").is_file()
    True
    """
    # A wheel has the configs inside the package, an editable install beside it in the checkout.
    package = Path(__file__).resolve().parents[1]
    for root in (package / "configs", package.parent / "configs"):
        if (root / "solo_ext").is_dir():
            return root
    raise FileNotFoundError(
        f"solo_ext's configs are neither in {package} nor beside it; reinstall solo-ext"
    )


def data_root() -> Path:
    """Folder of the data sets: the environment variable ``SOLO_EXT_DATA``, or ``./datasets``.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, SOLO_EXT_DATA="/data"):
    ...     data_root() / "cifar10"
    PosixPath('/data/cifar10')
    """
    return Path(os.environ.get("SOLO_EXT_DATA", "datasets"))


def cache_root() -> Path:
    """Folder of cached files: the environment variable ``SOLO_EXT_CACHE``, or the user's own.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, SOLO_EXT_CACHE="/scratch/cache"):
    ...     cache_root()
    PosixPath('/scratch/cache')
    """
    # `Path.home` fails for users without a home folder, as in some containers.
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("SOLO_EXT_CACHE") or os.path.join(own, "solo_ext"))


def is_file(path: Path) -> bool:
    """Whether the file exists; ``False`` for a name that the system does not allow.

    >>> is_file(Path(__file__)), is_file(Path("a" * 5000))
    (True, False)
    """
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def open_regular(path: Path) -> BinaryIO:
    """Opens a file that may come from someone else for reading.

    Raises:
        UserError: the path is neither a file nor a link to one, or the system refuses to read it.
        FileNotFoundError: the path does not exist.

    >>> open_regular(Path("/dev/zero"))
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: '/dev/zero' cannot be read: it is no regular file; name a file
    """
    try:
        # Do not block: opening a pipe would wait for a writer forever. Devices are refused below,
        # because reading them may never end.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{str(path)!r} cannot be read: {why}") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        what = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise UserError(f"{str(path)!r} cannot be read: it is {what}; name a file")
    return open(handle, "rb")


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """The UTF-8 text of a file that may come from someone else, of at most ``most`` bytes.

    Raises:
        UserError: as :func:`open_regular`, or the file is larger or not UTF-8.
        FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "note.txt"
    >>> _ = file.write_text("a note")
    >>> read_text(file)
    'a note'
    >>> read_text(file, most=3)
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.UserError: '...note.txt' cannot be read: it has more than 3 bytes
    """
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise UserError(f"{str(path)!r} cannot be read: it has more than {most:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{str(path)!r} cannot be read: line {line} is no UTF-8; write it again, or restore it"
        ) from None


def read_json(path: Path, kind: type[M]) -> M:
    """Reads a JSON file as an object of a pydantic class or a typed dictionary.

    Raises:
        UserError: as :func:`read_text`, or the JSON is not valid; names the first invalid entry.
        FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "sizes.json"
    >>> _ = file.write_text('{"train": 50000}')
    >>> read_json(file, dict[str, int])
    {'train': 50000}
    """
    try:
        return TypeAdapter(kind).validate_json(read_text(path))
    except ValidationError as error:
        raise UserError(f"{str(path)!r} cannot be read: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's errors in one line, with the key that it concerns.

    >>> try:
    ...     TypeAdapter(dict[str, int]).validate_python({"train": []})
    ... except ValidationError as error:
    ...     print(first_problem(error))
    train: Input should be a valid integer
    """
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def refuse_link(path: Path) -> Path:
    """Returns the path of a file to be written in place; refuses links, pipes and folders.

    A folder from someone else may hold links to the user's own files.

    Raises:
        UserError: the path exists and is not a regular file.

    >>> import tempfile
    >>> link = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> link.symlink_to("/dev/null")
    >>> refuse_link(link)
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.UserError: '...metrics.jsonl' is a link to '/dev/null', which would be ...
    """
    if path.is_symlink():
        raise UserError(
            f"{str(path)!r} is a link to {str(path.resolve())!r}, which would be written; remove it"
        )
    if path.exists() and not path.is_file():
        raise UserError(f"{str(path)!r} is no regular file, and would be written; remove it")
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that names the file in disk errors, also in those that a library reports.

    >>> with writing(Path("model.safetensors")):
    ...     raise RuntimeError("I/O error: No space left on device")
    Traceback (most recent call last):
        ...
    OSError: [Errno 28] No space left on device: 'model.safetensors'
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

    ``write`` is called with the path of a scratch file, which then replaces ``path``. Several
    processes may write the same file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "table.bin"
    >>> atomic_write(file, Path.touch)
    >>> file.exists()
    True
    """
    # The name includes the host, because processes of several hosts may share the folder.
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.saving")
    try:
        # Remove a link with the scratch file's name: writing would follow it.
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
    """Writes a text by :func:`atomic_write`.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_text(file, "whole")
    >>> file.read_text()
    'whole'
    """
    atomic_write(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def append_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    r"""Appends one line of JSON per entry; a last line that is incomplete is removed first.

    Raises:
        UserError: the file is a link or not a regular file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> _ = file.write_text('{"step": 0}\n{"ste')  # a process was killed here
    >>> append_lines(file, [{"step": 1}])
    >>> file.read_text().splitlines()
    ['{"step": 0}', '{"step": 1}']
    """
    text = "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries)
    with writing(file), refuse_link(file).open("a+b") as held:
        held.seek(0)
        content = held.read()
        end = content.rfind(b"\n") + 1
        try:
            # Only the end of the line is missing where another program wrote it.
            json.loads(content[end:])
            text = f"\n{text}"
        except ValueError:
            held.truncate(end)
        held.write(text.encode())
        held.flush()
        os.fsync(held.fileno())


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file, one per line; skips other lines; empty if there is no file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> append_lines(file, [{"step": 0}, {"step": 1}])
    >>> read_jsonl(file)
    [{'step': 0}, {'step': 1}]
    """
    try:
        with open_regular(file) as opened:
            lines = opened.read().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


@contextlib.contextmanager
def locked(file: Path, wait: float = -1) -> Iterator[None]:
    """Context manager that one process at a time can enter per lock file.

    It waits up to ``wait`` seconds for another process, or forever if ``wait`` is negative.

    Raises:
        UserError: another process still holds the lock, or the file is a link.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "run.lock"
    >>> with locked(file):
    ...     file.exists()
    True
    """
    lock = FileLock(refuse_link(file))
    try:
        # Some network file systems lack locks; the user then has to keep two runs apart.
        with contextlib.suppress(NotImplementedError):
            lock.acquire(wait)
    except Timeout:
        raise UserError(
            f"{str(file.parent)!r} is being written by {_holder(lock)}, or name another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _holder(lock: FileLock) -> str:
    """Who holds a lock, and what to do about it.

    Where the system has no locks, a file with the holder's process and host is the lock, and stays
    there if that host goes down, or if a folder is copied with it.
    """
    if not isinstance(lock, SoftFileLock):
        return "another process; wait for it"
    process = "another process"
    with contextlib.suppress(OSError, UserError, ValueError):
        pid, host, *_ = read_text(Path(lock.lock_file), most=1000).split()
        process = f"process {int(pid)} on {host!r}"
    return f"{process}; wait for it, remove {lock.lock_file!r} if it has ended"


def check_archive(path: Path) -> None:
    """Refuses an archive that unpacks to more than its size; ``torch.save`` compresses nothing.

    A file that is no archive passes; reading it will raise the error.

    Raises:
        UserError: the file is not a regular file, or its entries are compressed or overlap.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "file.pth"
    >>> with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
    ...     archive.writestr("weights", "")
    >>> check_archive(file)
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: checkpoint '...' cannot be read: 'weights' in it is ...
    """
    with contextlib.suppress(FileNotFoundError):
        open_regular(path).close()
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        size = path.stat().st_size
    except Exception:
        # zipfile raises many types of error for a damaged archive; torch.load will report it.
        return
    packed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    if packed or sum(e.file_size for e in entries) > size:
        what = f"{packed[0]!r} in it is compressed" if packed else "its entries overlap"
        raise UserError(
            f"checkpoint {str(path)!r} cannot be read: {what}, which torch.save does not do"
        )
