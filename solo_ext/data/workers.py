"""How a loader starts its workers, and what they do when the job is told to end."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

_OF_A_JOB = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n))


def worker_context(num_workers: int, start_method: str | None) -> str | None:
    """What a ``DataLoader`` takes as ``multiprocessing_context``.

    Args:
        num_workers: a loader without workers takes no context.
        start_method: ``data.start_method``; ``None`` is Python's default.
    """
    if not num_workers:
        return None
    _end_with_the_program()
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
    """Lets a worker serve as long as the training process, which got the same signal, asks it to.

    Clusters send a signal to every process of a job. A worker that it ended would end the run
    within the step, the E-step or the evaluation at hand, and with it what the run has to write.
    What a ``DataLoader`` takes as ``worker_init_fn``.

    Args:
        worker: its number.
    """
    for number in _OF_A_JOB:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    # torch looks for the process that forked it, which outlives a training process that is killed
    # where that is Python's fork server.
    parent.join()
    os._exit(1)


@functools.cache
def _end_with_the_program() -> None:
    """Python ends what is left at its exit with SIGTERM, and would wait for workers for ever."""
    atexit.register(_kill_workers)


def _kill_workers() -> None:
    left = [child for child in multiprocessing.active_children() if child.daemon]
    if left and hasattr(signal, "SIGCHLD"):
        # A loader would raise, here, that they were killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in left:
        child.kill()
