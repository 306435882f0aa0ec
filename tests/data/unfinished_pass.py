"""A program that ends within a pass of workers, for ``test_start_method.py``.

python unfinished_pass.py FOLDER METHOD "exit"|"kill -9"
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from solo_ext.data.workers import WorkerLoader

if __name__ == "__main__":
    said = Path(sys.argv[1]) / "said"
    # A spawned one imports torch.
    workers = 1 if sys.argv[2] == "spawn" else 2
    loader = WorkerLoader(range(1000), num_workers=workers, start_method=sys.argv[2])
    batches = iter(loader)
    next(batches)
    assert len(multiprocessing.active_children()) == workers
    said.write_text("a batch\n")
    if sys.argv[3] == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
