"""Signals that ask a run to end, and are answered at the next good place."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""SIGTERM of whoever ends a job, and SIGUSR1, which SLURM sends ahead if told to."""


class StopSignals:
    """Keeps in mind that a signal came, in place of what it would have done.

    Attributes:
        received: the first signal that came, ``None`` before.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Takes the place of whoever handled the signals; only a main thread can."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def leave(self) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: Any) -> None:
        # Not the second time: launchers pass on what their processes were sent already.
        if self.received is None:
            self.received = signal.Signals(number)
