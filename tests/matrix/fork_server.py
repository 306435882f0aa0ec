"""Starts runs of PCL as forks of a process that has imported everything.

Reads names of run directories, a line each; answers with the number of the process that trains
there, and with its exit code once it is gone.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

import solo_ext.methods.pcl  # noqa: F401 (imports are no part of a run's life)
from solo_ext.config.compose import compose
from solo_ext.training.prepare import prepare
from solo_ext.training.pretrain import pretrain

CHANGES = [
    "max_epochs=60",
    "accelerator=cpu",
    "backbone.kwargs.channels=[8,8,8,8]",
    "backbone.kwargs.stem_width=8",
    "data.fraction=0.3",
    "data.augmentation=batch",
    "optimizer.batch_size=70",
    "method_kwargs.queue_size=300",
    "method_kwargs.warmup_epochs=5",
    "checkpoint.every_n_steps=1",
    "online_eval.every_n_epochs=20",
]


def train(run_dir: str) -> None:
    """Begins a run, or goes on with it, as the command line would."""
    torch.set_num_threads(1)
    prepared = prepare(compose("digits/pcl", CHANGES))
    pretrain(prepared, run_dir=Path(run_dir), show_progress=False)


def main() -> None:
    """Serves until standard input ends."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                train(line.strip())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
