"""Worker processes of loaders: how they start, ignore the job's signals, and end."""

from __future__ import annotations

import atexit
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
JOB_SIGNALS = tuple(
    getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)
)
"""Ctrl-C, SIGTERM from whoever ends a job, and SIGUSR1, which SLURM can send before time is up."""
_OUT_OF_MEMORY = tuple(getattr(signal, n) for n in ("SIGKILL", "SIGBUS") if hasattr(signal, n))
"""Signals that end a worker when the system runs out of memory or shared memory."""
_SECONDS_TO_END = 1.0


class WorkerLoader(DataLoader[Any]):
    """A ``DataLoader`` that loads the rest of a pass itself after a worker was killed.

    The system kills processes when memory runs out. The batches stay the same but come slower.
    ``on_lost`` is called with a one-line message; by default it logs a warning.

    Raises:
        ProcessLost: while iterating, a worker crashed; its sample would crash this process too.

    >>> loader = WorkerLoader(range(5), num_workers=0, start_method=None, batch_size=2)
    >>> [batch.tolist() for batch in loader]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self, dataset: Any, *, num_workers: int, start_method: str | None, **options: Any
    ) -> None:
        self.on_lost: Callable[[str], None] = logger.warning
        super().__init__(
            dataset,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=_context(num_workers, start_method),
            worker_init_fn=_outlive_signals,
            # A loader without its own generator draws from the global one.
            generator=torch.Generator(),
            **options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            batches = _started(super().__iter__)
        finally:
            if self.num_workers:
                # Register it once, and after torch's own handler, which waits for every worker.
                atexit.unregister(_kill_workers)
                atexit.register(_kill_workers)
        served = 0
        try:
            for batch in batches:
                served += 1
                yield batch
            return
        except Exception as error:
            killed = isinstance(error, RuntimeError | OSError | EOFError)
            lost = _lost_of(batches) if killed else None
            if lost is None:
                # torch ends the workers when their iterator is collected. If the error refers to
                # the iterator, its queues are collected first, and torch waits 5 s for each worker.
                self._iterator = None
                if self.num_workers:
                    batches._shutdown_workers()
                raise
            if lost not in _OUT_OF_MEMORY:
                raise ProcessLost(
                    f"a data worker crashed ({lost.name}); data.num_workers=0 shows what it was at"
                ) from error
        for worker in batches._workers:
            # Free the memory of these workers; the next pass starts new ones.
            worker.kill()
        self._iterator = None
        self.on_lost(
            f"a data worker was killed ({lost.name}), as the system does when memory is used up"
        )
        assert self.batch_sampler is not None
        read: Any = getattr(self.dataset, "__getitems__", None)
        for keys in islice(self.batch_sampler, served, None):
            yield self.collate_fn(read(keys) if read else [self.dataset[key] for key in keys])


def _started(start: Callable[[], Any]) -> Any:
    """Starts workers without torch's handler of SIGCHLD.

    That handler raises an error at any point of a training step. Without the handler, a lost worker
    is noticed when its batch is waited for.
    """
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return start()
    held = signal.getsignal(signal.SIGCHLD)
    if held is None or getattr(held, "__module__", "").startswith("torch.utils.data."):
        # A plain `DataLoader` in this process has already installed torch's handler.
        held = signal.SIG_DFL
    try:
        return start()
    finally:
        signal.signal(signal.SIGCHLD, held)


def _lost_of(batches: Any) -> signal.Signals | None:
    """The signal that ended a worker of an iterator; ``None`` if no worker was killed."""
    workers = list(getattr(batches, "_workers", ()))
    # The pipe may break a moment before the process has ended.
    ended = wait([worker.sentinel for worker in workers], timeout=_SECONDS_TO_END)
    for worker in workers:
        if worker.sentinel in ended:
            # The sentinel closes before the exit code is known.
            worker.join(_SECONDS_TO_END)
    codes = [worker.exitcode for worker in workers]
    return next((signal.Signals(-code) for code in codes if code is not None and code < 0), None)


def _context(num_workers: int, start_method: str | None) -> str | None:
    """Value for ``multiprocessing_context`` of a ``DataLoader``; ``None`` is Python's default."""
    if not num_workers:
        return None
    if threading.current_thread() is threading.main_thread():
        chosen = start_method or multiprocessing.get_start_method(allow_none=True)
        # The first of all methods is the default; `get_start_method()` would fix it for good.
        start_helpers(chosen or multiprocessing.get_all_start_methods()[0])
    return start_method


def start_helpers(start_method: str) -> None:
    """Starts Python's resource tracker and fork server so that they ignore the job's signals.

    >>> start_helpers("spawn")
    """
    # A new process inherits which signals are ignored.
    held = {n: signal.signal(n, signal.SIG_IGN) for n in JOB_SIGNALS}
    try:
        resource_tracker.ensure_running()
        if start_method == "forkserver":
            forkserver.ensure_running()
    finally:
        for number, handler in held.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _outlive_signals(worker: int) -> None:
    """Makes a worker ignore the job's signals.

    Clusters send a signal to every process of a job. The training process reacts to it, and needs
    its workers until it has finished the step, the E-step or the evaluation and saved its state.
    """
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    # torch's watchdog waits for the process that forked the worker. With `forkserver` that is the
    # fork server, which outlives the training process.
    parent.join()
    os._exit(1)


def _kill_workers() -> None:
    # At exit, Python would send SIGTERM, which workers ignore, and wait for them forever.
    left = [child for child in multiprocessing.active_children() if child.daemon]
    if left and hasattr(signal, "SIGCHLD"):
        # A loader's handler would raise an error here because its workers were killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in left:
        child.kill()
