"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from solo_ext.errors import UserError

PARENT = "SOLO_EXT_BENCHMARK_PARENT"


@contextlib.contextmanager
def locked(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Holds a folder; the lock of a killed process is free.

    Args:
        folder: an existing one.
        wait: seconds to wait for another process.

    Raises:
        UserError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Without locks of files, two runs at once are up to the user.
        yield
        return
    with (folder / ".lock").open("a") as file:
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(
                        f"{str(folder)!r} is being written by another process; wait for it, or "
                        "name another folder"
                    ) from None
                time.sleep(0.1)
        yield


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, killed or not."""
    if PARENT not in os.environ:
        return
    parent = os.getppid()
    # Lightning starts further ranks from the first one.
    if "LOCAL_RANK" not in os.environ and parent != int(os.environ[PARENT]):
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
