"""A program that ends within a pass of workers, for ``test_start_method.py``.

python unfinished_pass.py FOLDER METHOD "exit"|"kill -9"
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from torch.utils.data import DataLoader

from solo_ext.data.workers import outlive_signals, worker_context

if __name__ == "__main__":
    said = Path(sys.argv[1]) / "said"
    loader = DataLoader(
        range(1000),  # type: ignore[arg-type]
        num_workers=2,
        multiprocessing_context=worker_context(2, sys.argv[2]),
        worker_init_fn=outlive_signals,
    )
    batches = iter(loader)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    said.write_text("a batch\n")
    if sys.argv[3] == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
