"""Which runs end within a time limit: by the epochs that were timed in this call."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from solo_ext.lab.experiments.work import PLANNED
from solo_ext.lab.training.epoch_log import read_epochs

AROUND = 45.0
"""Seconds that start and evaluation of a run are assumed to take."""
_SAVING = 40.0
"""Seconds kept for runs that are stopped to save, and for writing their records."""
_ENOUGH = 2
"""Epochs that must be timed before a run is judged; the latest so many count."""


class Pace:
    """Predicts when runs end, and chooses those that a time limit leaves room for.

    Args:
        until: when the command has to end, as ``time.monotonic()`` counts; infinity: no limit.

    >>> Pace(time.monotonic() + 600).left > 500
    True
    """

    def __init__(self, until: float) -> None:
        self.until = until
        # Number of the first epoch that counts, of each run that was started: the first epoch of a
        # process takes longer, and one that began at another load says nothing about the present.
        self._counts_from: dict[Path, int] = {}

    @property
    def left(self) -> float:
        """Seconds until the runs must be stopped."""
        return self.until - _SAVING - time.monotonic()

    def starts(self, folder: Path) -> None:
        """Notes that a run was started."""
        self._counts_from[folder] = len(_epochs(folder)) + 1

    def load_changes(self, running: Sequence[Path]) -> None:
        """Notes that epochs which these runs have begun do not count any more."""
        self._counts_from |= {folder: len(_epochs(folder)) + 1 for folder in running}

    def next_of(self, waiting: Sequence[Path], *, idle: bool) -> Path | None:
        """The first run that is predicted to end in time.

        If none is by what is declared alone, and the machine is ``idle``, the first one starts all
        the same: a wrong guess must not leave it so.
        """
        left = self.left
        if left <= 0 or not waiting:
            return None
        if left == math.inf:
            return waiting[0]
        guessed = waiting[0] if idle and not self._ratios() else None
        return next((folder for folder in waiting if self.needs(folder) <= left), guessed)

    def needs(self, folder: Path) -> float:
        """Seconds that a run needs that is not running; 0 if the settings declare no minutes.

        It is what they declare, times the ratio of measured to declared times in this call, less
        the part that an earlier call trained.
        """
        epochs, declared = _planned(folder)
        if declared is None:
            return 0.0
        trained = min(1.0, len(_epochs(folder)) / max(1, epochs))
        ratio = statistics.median(self._ratios() or [1.0])
        return max(AROUND, declared * ratio * (1 - trained))

    def superfluous(self, running: Sequence[Path]) -> Path | None:
        """The run to stop, so that others end in time: the last one that trains, if any will not.

        Runs share the machine: without the last one the others are faster. The only one that trains
        goes on until the limit, which may be more generous than the prediction; so does one that is
        trained and evaluated.
        """
        left = self.left
        training = [] if left == math.inf else [f for f in running if self._epochs_left(f) > 0]
        ending = [seconds for folder in training if (seconds := self._ends_in(folder)) is not None]
        late = bool(ending) and max(ending) > left
        return training[-1] if late and len(training) > 1 else None

    def _each(self, folder: Path) -> float | None:
        """Seconds of an epoch at the present load; of a short run that is trained, of all."""
        timed = _epochs(folder)
        latest = timed[self._counts_from[folder] :]
        if len(latest) < _ENOUGH:
            return statistics.fmean(timed) if 0 < _planned(folder)[0] <= len(timed) else None
        return statistics.fmean(latest[-_ENOUGH:])

    def _ends_in(self, folder: Path) -> float | None:
        each = self._each(folder)
        return None if each is None else self._epochs_left(folder) * each + AROUND

    def _epochs_left(self, folder: Path) -> int:
        return _planned(folder)[0] - len(_epochs(folder))

    def _ratios(self) -> list[float]:
        """Measured by declared seconds of the runs that were started in this call."""
        found = []
        for folder in self._counts_from:
            (epochs, declared), each = _planned(folder), self._each(folder)
            if declared is not None and each is not None:
                found.append((epochs * each + AROUND) / declared)
        return found


def _planned(folder: Path) -> tuple[int, float | None]:
    """Epochs and declared seconds of a run."""
    planned = json.loads((folder / PLANNED).read_text())
    epochs = 0 if planned["baseline"] else planned["config"]["max_epochs"]
    minutes: float | None = planned["minutes"]
    return epochs, None if minutes is None else 60 * minutes


def _epochs(folder: Path) -> Sequence[float]:
    """Seconds of each epoch that was timed, in their order."""
    return [epoch["seconds"] for epoch in read_epochs(folder)]
