"""``solo-ext`` where the clock steps, and the file system is slow or without locks.

python disturbed.py STEP AFTER DELAY LOCKS WORDS... moves the clock by STEP seconds after AFTER
seconds, delays what changes or lists files by DELAY seconds each, and allows no locks if LOCKS is
0.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from solo_ext.lab.cli.main import main

_SLOW = ("fsync", "replace", "rename", "unlink", "mkdir", "scandir", "open")


def _delayed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **kwargs)

    return delayed


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _disturb(step: float, after: float, delay: float, locks: float) -> None:
    begin, clock, clock_ns = time.monotonic(), time.time, time.time_ns

    def moved() -> float:
        return step if time.monotonic() - begin >= after else 0.0

    time.time = lambda: clock() + moved()
    time.time_ns = lambda: clock_ns() + int(moved() * 1e9)
    for name in _SLOW if delay else ():
        setattr(os, name, _delayed(getattr(os, name), delay))
    if not locks:
        fcntl.flock = _no_locks


if __name__ == "__main__":
    _disturb(*(float(sys.argv.pop(1)) for _ in range(4)))
    sys.exit(main())
