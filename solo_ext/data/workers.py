"""Loaders with worker processes, which outlive signals to the job and may be lost to the system."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from solo_ext.core.errors import ProcessLost

logger = logging.getLogger(__name__)
_OF_A_JOB = tuple(
    getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)
)
_OF_THE_SYSTEM = tuple(getattr(signal, n) for n in ("SIGKILL", "SIGBUS") if hasattr(signal, n))
"""By which a worker ends where memory, or shared memory, is used up."""
_A_MOMENT = 1.0


class WorkerLoader(DataLoader[Any]):
    """A ``DataLoader`` that serves the rest of its batches itself once a worker was killed.

    The system kills processes when memory ends. The batches are the same; only slower.

    Attributes:
        on_lost: called with what happened to a worker; a warning by default.

    Args:
        dataset: of which a sample does not depend on the process that makes it.
        num_workers: worker processes; batches do not depend on it.
        start_method: of the workers; ``None`` takes Python's default.
        options: further ones of ``DataLoader``.

    Raises:
        ProcessLost: while it is iterated: a worker crashed, as this process would on its sample.
    """

    def __init__(
        self, dataset: Any, *, num_workers: int, start_method: str | None, **options: Any
    ) -> None:
        self.on_lost: Callable[[str], None] = logger.warning
        super().__init__(
            dataset,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=worker_context(num_workers, start_method),
            worker_init_fn=outlive_signals,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = _started(super().__iter__)
        served = 0
        try:
            for batch in batches:
                served += 1
                yield batch
            return
        except (RuntimeError, OSError, EOFError) as error:
            lost = _lost_of(batches)
            if lost is None:
                raise
            if lost not in _OF_THE_SYSTEM:
                raise ProcessLost(
                    f"a data worker crashed ({lost.name}); data.num_workers=0 shows what it was at"
                ) from error
        self._give_up(batches)
        self.on_lost(
            f"a data worker was killed ({lost.name}), as the system does when memory is used up"
        )
        assert self.batch_sampler is not None
        for keys in islice(self.batch_sampler, served, None):
            yield self.collate_fn([self.dataset[key] for key in keys])

    def _give_up(self, batches: Any) -> None:
        """Ends the workers that are left: what they hold is of no use, and memory is short."""
        for worker in batches._workers:
            worker.kill()
        # Of persistent workers; the next pass starts new ones.
        self._iterator = None


def _started(start: Callable[[], Any]) -> Any:
    """Starts workers whose end is noticed where a batch is waited for.

    torch's handler of SIGCHLD would raise wherever this process is, in the midst of a step.
    """
    if not hasattr(signal, "SIGCHLD") or not _in_main_thread():
        return start()
    held = signal.getsignal(signal.SIGCHLD)
    try:
        return start()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if held is None else held)


def _lost_of(batches: Any) -> signal.Signals | None:
    """The signal that ended a worker of an iterator; ``None`` where none was."""
    workers = list(getattr(batches, "_workers", ()))
    # What it was sending may break off a moment before it is gone.
    ended = wait([worker.sentinel for worker in workers], timeout=_A_MOMENT)
    for worker in workers:
        if worker.sentinel in ended:
            # Its files are closed before the system tells how it ended.
            worker.join(_A_MOMENT)
    codes = [worker.exitcode for worker in workers]
    return next((signal.Signals(-code) for code in codes if code is not None and code < 0), None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def worker_context(num_workers: int, start_method: str | None) -> str | None:
    """What a ``DataLoader`` takes as ``multiprocessing_context``.

    Args:
        num_workers: a loader without workers takes no context.
        start_method: ``data.start_method``; ``None`` is Python's default.
    """
    if not num_workers:
        return None
    _end_with_the_program()
    if _in_main_thread():
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
