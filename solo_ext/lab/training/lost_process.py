"""A run that waits for a process which is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl

from solo_ext.core.errors import ProcessLost
from solo_ext.lab.training.run_dir import how_to_go_on
from solo_ext.lab.training.run_state import RunState

# Backends have no class of error for it, gloo not even one of its own. Not among them: a port that
# is taken, processes that never met, a collective that does not fit another's.
_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "timed out waiting",
)
_LONGEST = 160


@contextlib.contextmanager
def lost_process_named(run_dir: Path, trainer: pl.Trainer, state: RunState) -> Iterator[None]:
    """Says in one line that another process is gone, where the group's own error would.

    Args:
        run_dir: of the run.
        trainer: of the run.
        state: of the run; before it is restored, processes may never have met.

    Raises:
        ProcessLost: a collective failed because another process is gone, or hangs.
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        met = trainer.world_size > 1 and state.restored
        if not met or not any(words in text.lower() for words in _GONE):
            raise
        # After the path of gloo's source.
        what = text.partition("] ")[2] if text.startswith("[") else text
        raise ProcessLost(
            f"another process of this run is gone or hangs, at epoch {trainer.current_epoch}, "
            f"optimiser step {trainer.global_step} ({what[:_LONGEST]}); why is in what it printed "
            f"or in its node's log; {how_to_go_on(run_dir)}"
        ) from error
