"""Locks between processes, which those that end, killed or not, let go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from solo_ext.errors import UserError
from solo_ext.paths import refuse_link


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
