"""The command line, whose second process is killed in its second epoch.

python killed_rank_run.py FOLDER WORD ...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from solo_ext.cli.main import main
from solo_ext.training.nonfinite import NonFiniteWatch


def dies(self: Any, trainer: Any, *args: Any) -> None:
    """In place of a hook of a callback that every run has."""
    if trainer.global_rank == 1 and trainer.current_epoch == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    setattr(NonFiniteWatch, "on_train_epoch_start", dies)  # noqa: B010
    sys.exit(main(sys.argv[2:]))
