"""Starts runs as forks of a process that has imported everything.

Reads lines of JSON, ``{"config": a file, "run_dir": a folder}``; answers each with the number of
the process that trains there, and with its exit code once it is gone.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from solo_ext import host
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain


def train(config: str, run_dir: str) -> None:
    """Begins a run, or goes on with it, as the command line would."""
    torch.set_num_threads(1)
    prepared = prepare(json.loads(Path(config).read_text()))
    pretrain(prepared, run_dir=Path(run_dir), show_progress=False)


def main() -> None:
    """Serves until standard input ends."""
    # Imports are no part of a run's life.
    host.load()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(**json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
