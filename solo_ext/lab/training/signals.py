"""Signals that ask a run to end; all processes of the run react at the same step."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from solo_ext.core import distributed
from solo_ext.data.workers import JOB_SIGNALS
from solo_ext.lab.ending import note_answer

logger = logging.getLogger(__name__)
_STANDARD_ERROR = 2
_SECONDS, _MOST_STEPS = 5.0, 10_000
"""Approximate time between two exchanges of several processes, and the most steps."""


class StopSignals:
    """Stores the first signal in ``received``; prints ``answer`` on Ctrl-C.

    >>> with StopSignals("the batch is finished first") as signals:
    ...     signal.raise_signal(signal.SIGTERM)
    >>> signals.received.name
    'SIGTERM'
    """

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Replaces the handlers of the signals; outside the main thread it does nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in JOB_SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def leave(self) -> None:
        """Restores the previous handlers, except where ours has been replaced since."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def __enter__(self) -> StopSignals:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _note(self, number: int, frame: Any) -> None:
        note_answer(number)
        # Ignore a second signal: launchers forward signals that their processes already received,
        # and a second Ctrl-C must not interrupt the writing of a checkpoint.
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
            # print() is not safe here, because the signal may have interrupted another print().
            os.write(_STANDARD_ERROR, f"\nsolo-ext: {self.answer}\n".encode())


def slurm_job() -> str | None:
    """The job's id for SLURM's commands; ``None`` outside SLURM.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3"):
    ...     slurm_job()
    '17_3'
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def requeue(received: signal.Signals) -> bool:
    """Asks SLURM to run this job again.

    It does so only after SIGUSR1, which SLURM sends before its time limit if ``sbatch --signal``
    asks for it. SIGTERM does not count: ``scancel`` sends it too, and SLURM itself requeues a job
    that it pre-empts.

    >>> requeue(signal.SIGTERM)
    False
    """
    job = slurm_job()
    if job is None or received is not signal.SIGUSR1:
        return False
    command = shutil.which("scontrol")
    if command is None:
        logger.warning(f"job {job} is not requeued: there is no scontrol here")
        return False
    done = subprocess.run([command, "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        logger.warning(f"job {job} is not requeued: {reason}")
    return done.returncode == 0


class Agreement:
    """Makes all processes act on a signal or a time limit at the same step.

    A signal reaches processes at different steps, but they must write a checkpoint together. A
    single process decides at every step. Several processes exchange what they know about every five
    seconds, at a step that their last exchange determined; between exchanges none of them acts.

    >>> Agreement().any_of([signal.SIGTERM, 0], 100, torch.device("cpu"))
    [<Signals.SIGTERM: 15>, 0]
    """

    def __init__(self) -> None:
        self._next: int | None = None
        self._last: tuple[int, float] | None = None

    def any_of(
        self, flags: Sequence[int], step: int, device: torch.device, *, now: bool = False
    ) -> list[int]:
        """The largest value of every wish over all processes; zeros between two exchanges.

        Every process must call it at the same steps.

        Args:
            flags: whole numbers, 0 for none.
            step: optimiser steps so far.
            device: for the exchange; the process group must be able to send from it.
            now: whether to exchange at this step in any case.
        """
        if distributed.world_size() == 1:
            return list(flags)
        if not now and self._next is not None and step < self._next:
            return [0] * len(flags)
        values = torch.tensor([*flags, self._ahead(step)], device=device)
        *agreed, ahead = distributed.max_over_ranks(values).tolist()
        self._next = step + ahead
        return agreed

    def _ahead(self, step: int) -> int:
        """Number of steps until the next exchange, estimated from the duration of the last ones."""
        last, self._last = self._last, (step, time.monotonic())
        if last is None or step <= last[0]:
            return 1
        taken, each = step - last[0], (self._last[1] - last[1]) / (step - last[0])
        # The first steps are slow, so the interval grows gradually.
        return max(1, min(int(_SECONDS / max(each, 1e-9)), 4 * taken, _MOST_STEPS))
