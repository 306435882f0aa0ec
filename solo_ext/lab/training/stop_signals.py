"""Signals that ask a run to end, and are answered at the next good place."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""Ctrl-C, SIGTERM of whoever ends a job, and SIGUSR1, which SLURM sends ahead if told to."""
_STANDARD_ERROR = 2


class StopSignals:
    """Keeps in mind that a signal came, in place of what it would have done.

    Args:
        answer: what is said to whoever presses Ctrl-C, for the work at hand may take long.

    Attributes:
        received: the first signal that came, ``None`` before.
    """

    def __init__(self, answer: str) -> None:
        self.answer = answer
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

    def __enter__(self) -> StopSignals:
        self.listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def _note(self, number: int, frame: Any) -> None:
        # Not the second time: launchers pass on what their processes were sent already, and what
        # was begun to be saved is not to be lost to a Ctrl-C more.
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
            # Not by print(), which may be at work where the signal came.
            os.write(_STANDARD_ERROR, f"\nsolo-ext: {self.answer}\n".encode())
