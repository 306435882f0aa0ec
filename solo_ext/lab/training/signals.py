"""Signals that ask a run to end; all processes of the run answer them at the same step."""

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

logger = logging.getLogger(__name__)
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""Ctrl-C, SIGTERM of whoever ends a job, and SIGUSR1, which SLURM sends ahead if told to."""
_STANDARD_ERROR = 2
_MOST_STEPS = 10_000


class StopSignals:
    """Remembers that a signal came, and does nothing else about it.

    Args:
        answer: printed when the user presses Ctrl-C, because the work at hand may take long.

    Attributes:
        received: the first signal that came, ``None`` before.
    """

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Replaces the handlers of the signals; outside the main thread it does nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def leave(self) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def __enter__(self) -> StopSignals:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _note(self, number: int, frame: Any) -> None:
        # A second signal is ignored: launchers pass on what their processes received already, and
        # a second Ctrl-C must not interrupt a checkpoint that is being written.
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
            # print() is not safe here: the signal may have interrupted another print().
            os.write(_STANDARD_ERROR, f"\nsolo-ext: {self.answer}\n".encode())


def slurm_job() -> str | None:
    """The job's name for SLURM's commands; ``None`` outside SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def requeue(received: signal.Signals) -> bool:
    """Asks SLURM to run this job again.

    Only SIGUSR1 does so, which SLURM sends before the time is over where ``sbatch --signal`` asks
    for it. SIGTERM is also what ``scancel`` sends, and SLURM itself requeues a job that it
    pre-empts.

    Args:
        received: the signal that the processes received.

    Returns:
        Whether the job is in the queue again.
    """
    job = slurm_job()
    if job is None or received is not getattr(signal, "SIGUSR1", None):
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
    """Makes all processes act on a signal or a clock at the same step.

    A signal reaches processes at different steps, but they write a checkpoint together. A run of
    one process decides at every step. Several processes exchange what they know about every
    ``seconds``, at a step that their last exchange named; in between none of them acts.

    Args:
        device: of the exchange, one that the process group can send from.
        seconds: between exchanges, roughly.
    """

    def __init__(self, device: torch.device, seconds: float = 5.0) -> None:
        self.device, self.seconds = device, seconds
        self._next: int | None = None
        self._last: tuple[int, float] | None = None

    def any_of(self, wishes: Sequence[int], step: int, *, now: bool = False) -> list[int]:
        """The largest value of every wish over the processes; zeros between two exchanges.

        Every process has to call it at the same steps.

        Args:
            wishes: whole numbers, 0 for none.
            step: optimiser steps so far.
            now: exchange at this step in any case.
        """
        if distributed.world_size() == 1:
            return list(wishes)
        if not now and self._next is not None and step < self._next:
            return [0] * len(wishes)
        values = torch.tensor([*wishes, self._ahead(step)], device=self.device)
        *agreed, ahead = distributed.max_over_ranks(values).tolist()
        self._next = step + ahead
        return agreed

    def _ahead(self, step: int) -> int:
        """Steps until the next exchange, estimated from how long the last steps took."""
        last, self._last = self._last, (step, time.monotonic())
        if last is None or step <= last[0]:
            return 1
        taken, each = step - last[0], (self._last[1] - last[1]) / (step - last[0])
        # The first steps are slow, so the interval grows gradually.
        return max(1, min(int(self.seconds / max(each, 1e-9)), 4 * taken, _MOST_STEPS))
