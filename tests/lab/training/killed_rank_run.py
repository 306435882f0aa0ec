"""The command line, of whose two processes one is killed in its second epoch.

python killed_rank_run.py FOLDER RANK PLACE WORD ...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from lightning.fabric.strategies.launchers import subprocess_script

from solo_ext.lab.cli.main import main
from solo_ext.lab.training.nonfinite import NonFiniteWatch
from solo_ext.methods.pcl import PCL

PLACES: dict[str, tuple[Any, str]] = {
    "step": (NonFiniteWatch, "on_before_backward"),
    "E-step": (PCL, "embed"),
}
"""What every run calls there."""


def dying(original: Any, rank: int) -> Any:
    """The method, but for one process."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = self.trainer if isinstance(self, PCL) else args[0]
        if trainer.global_rank == rank and trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    return method


if __name__ == "__main__":
    owner, name = PLACES[sys.argv[3]]
    setattr(owner, name, dying(getattr(owner, name), int(sys.argv[2])))
    # Lightning looks after its processes every five seconds, and kills those that are left: it
    # must not come first.
    setattr(subprocess_script._ChildProcessObserver, "run", lambda self: None)  # noqa: B010
    sys.exit(main(sys.argv[4:]))
