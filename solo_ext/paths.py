"""Where configs and data live, and how a file is written."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from solo_ext.errors import UserError, disk_errno


def config_root() -> Path:
    """Folder that holds ``solo_ext/<dataset>/<method>.yaml``.

    A wheel carries it inside the package; an editable install reads it from the checkout.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
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


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
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
    """As :func:`write_whole`; a crash of the machine leaves the old text or the new one."""

    def write(scratch: Path) -> None:
        with scratch.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    write_whole(path, write)
