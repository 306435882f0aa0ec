"""A run that waits for a process which is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
from torch.distributed import DistError

from solo_ext.errors import ProcessLost
from solo_ext.training.run_dir import checkpoints

# gloo's errors are plain RuntimeErrors.
_GLOO = "gloo/transport"
_LONGEST = 160


@contextlib.contextmanager
def lost_process_named(run_dir: Path, trainer: pl.Trainer) -> Iterator[None]:
    """Says in one line that another process is gone, where the group's own error would.

    Args:
        run_dir: of the run.
        trainer: of the run.

    Raises:
        ProcessLost: a collective failed.
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if trainer.world_size == 1 or not (isinstance(error, DistError) or _GLOO in text):
            raise
        if checkpoints(run_dir):
            then = f"go on with solo-ext pretrain --resume {run_dir}"
        else:
            then = "start it again, nothing is saved yet"
        # After the path of gloo's source.
        what = text.partition("] ")[2] if text.startswith("[") else text
        raise ProcessLost(
            f"another process of this run is gone, at epoch {trainer.current_epoch}, optimiser "
            f"step {trainer.global_step} ({what[:_LONGEST]}); why is in what it printed or in its "
            f"node's log; {then}"
        ) from error
