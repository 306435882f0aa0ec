"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import os
import threading
import time

PARENT = "SOLO_EXT_BENCHMARK_PARENT"
"""Environment variable: the process that started this one."""


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, killed or not."""
    if PARENT not in os.environ:
        return
    parent = os.getppid()
    # Lightning starts further ranks from the first one.
    if "LOCAL_RANK" not in os.environ and parent != int(os.environ[PARENT]):
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
