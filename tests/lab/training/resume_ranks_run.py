"""A run that Lightning starts once per process, for ``test_resume_ranks.py``.

python resume_ranks_run.py FOLDER, which holds ``config.json``, or the run ``whole`` to go on with
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume

STOP = 3
"""Batches after which the run is copied, within its second epoch of three."""


class Copy(Callback):
    """Leaves in a folder ``parts`` what a machine that fails then would leave."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.fit_loop.epoch_loop.total_batch_idx == STOP:
            shutil.copytree(self.run_dir, self.run_dir.parent / "parts" / "whole")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_dir = folder / "whole"
    torch.set_num_threads(1)
    if (folder / "config.json").exists():
        config = json.loads((folder / "config.json").read_text())
        pretrain(prepare(config), run_dir=run_dir, callbacks=[Copy(run_dir)], show_progress=False)
    else:
        resume(run_dir)
