"""A run of two processes that a signal to the second one ends, for ``test_stop_signals.py``.

python stopped_run.py FOLDER, which holds ``config.json``
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from solo_ext.core.errors import StoppedBySignal
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain


class SignalToTheSecond(Callback):
    """Within the first step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 0:
            os.kill(os.getpid(), signal.SIGUSR1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    prepared = prepare(json.loads((folder / "config.json").read_text()))
    try:
        pretrain(
            prepared, run_dir=folder / "run", callbacks=[SignalToTheSecond()], show_progress=False
        )
    except StoppedBySignal as stopped:
        (folder / f"rank-{os.environ.get('LOCAL_RANK', 0)}").write_text(f"{time.time()} {stopped}")
