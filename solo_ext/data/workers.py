"""How a loader starts its workers, and what they do when the job is told to end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver, resource_tracker
from typing import Any

_PATIENCE = 60.0
_OF_A_JOB = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n))


def worker_context(num_workers: int, start_method: str | None) -> str | None:
    """What a ``DataLoader`` takes as ``multiprocessing_context``.

    Args:
        num_workers: a loader without workers takes no context.
        start_method: ``data.start_method``; ``None`` is Python's default.
    """
    if not num_workers:
        return None
    if threading.current_thread() is threading.main_thread():
        chosen = start_method or multiprocessing.get_start_method(allow_none=True)
        # The first one is Python's default; asking for it would settle it for the whole program.
        _start_helpers(chosen or multiprocessing.get_all_start_methods()[0])
    return start_method


def _start_helpers(start_method: str) -> None:
    """Starts Python's own helping processes so that they too outlive signals to all processes."""
    # What is ignored stays so in a new program; handlers do not.
    held = {n: signal.signal(n, signal.SIG_IGN) for n in _OF_A_JOB}
    try:
        resource_tracker.ensure_running()
        if start_method == "forkserver":
            forkserver.ensure_running()
    finally:
        for number, handler in held.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def outlive_signals(worker: int) -> None:
    """Lets a worker serve until the training process, which got the same signal, has saved.

    Clusters send a signal to every process of a job. A worker that it ended would end the run
    within the step, and with it what the run has to write. What a ``DataLoader`` takes as
    ``worker_init_fn``.

    Args:
        worker: its number.
    """
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


def _end_later(number: int, frame: Any) -> None:
    # Not never: who ends a worker that hangs sends this too.
    timer = threading.Timer(_PATIENCE, os._exit, (0,))
    timer.daemon = True
    timer.start()
