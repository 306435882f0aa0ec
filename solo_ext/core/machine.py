"""What this process may use of its machine."""

from __future__ import annotations

import os


def cores() -> int:
    """Number of processor cores; a job may be restricted to some of those of its machine.

    >>> 1 <= cores() <= os.cpu_count()
    True
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
