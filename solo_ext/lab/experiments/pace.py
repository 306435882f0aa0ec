"""Which runs end within a time limit: by the epochs that were timed in this call."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from solo_ext.core.files import read_jsonl
from solo_ext.lab.experiments.work import EPOCHS, PLANNED

AROUND = 45.0
"""Seconds assumed for start and evaluation of a run until one has ended."""
_SAVING = 40.0
"""Seconds kept for runs that are stopped to save, and for writing their records."""
_ENOUGH = 2
"""Epochs that must be timed before a run is judged; the latest so many count."""


@dataclass
class _Started:
    at: float
    before: int
    """Epochs that were timed before this call."""
    judged_from: int = 0
    """Number of the first epoch that counts: not of the first, nor of one at another load."""


@dataclass
class Pace:
    """Predicts when runs end, and chooses those that a time limit leaves room for.

    Args:
        until: when the command has to end, as ``time.monotonic()`` counts.

    >>> Pace(time.monotonic() + 600).left > 500
    True
    """

    until: float
    _running: dict[Path, _Started] = field(default_factory=dict)
    _scales: list[float] = field(default_factory=list)
    _around: list[float] = field(default_factory=list)
    _started: int = 0

    @property
    def left(self) -> float:
        """Seconds until the runs must be stopped."""
        return self.until - _SAVING - time.monotonic()

    def starts(self, folder: Path) -> None:
        """Notes that a run was started."""
        self._started += 1
        before = len(_epochs(folder))
        self._running[folder] = _Started(time.monotonic(), before, before + 1)

    def ends(self, folder: Path, *, whole: bool) -> None:
        """Notes that a run ended; if it is ``whole``, how long it took counts for the next ones."""
        started, timed = self._running.pop(folder), _epochs(folder)
        took = time.monotonic() - started.at
        if whole and not started.before:
            self._around.append(max(0.0, took - sum(timed)))
            if (declared := _planned(folder)[1]) is not None:
                self._scales.append(took / declared)

    def stops(self, folder: Path) -> None:
        """Notes that a run was stopped; epochs that the others have begun do not count any more."""
        self._running.pop(folder)
        for other, started in self._running.items():
            started.judged_from = len(_epochs(other)) + 1

    def needs(self, folder: Path) -> float | None:
        """Seconds that a run needs that is not running; null if nothing is known.

        It is what the settings declare, times the ratio of measured to declared times in this call,
        less the part that an earlier call trained.
        """
        epochs, declared = _planned(folder)
        if declared is None:
            return None
        trained = min(1.0, len(_epochs(folder)) / max(1, epochs))
        scales = self._scales or [s for f in self._running if (s := self._scale(f)) is not None]
        whole = declared * (statistics.median(scales) if scales else 1.0)
        return max(self._rest(), whole * (1 - trained))

    def fits(self, folder: Path) -> bool:
        """Whether a run that is started now is predicted to end in time."""
        needed = self.needs(folder)
        return self.left > 0 if needed is None else needed <= self.left

    def next_of(self, waiting: Sequence[Path]) -> Path | None:
        """The first run that fits.

        If none does by what is declared alone, the first one starts all the same: a wrong guess
        must not leave the machine idle.
        """
        fitting = next((folder for folder in waiting if self.fits(folder)), None)
        guessed = not self._started and self.left > 0 and bool(waiting)
        return waiting[0] if fitting is None and guessed else fitting

    def superfluous(self) -> Path | None:
        """The run to stop, so that others end in time: the last one, if any will not.

        Runs share the machine: without the last one the others are faster. The only run goes on
        until the limit, which may be more generous than the prediction.
        """
        ending = [self._ends_in(folder) for folder in self._running]
        late = any(seconds is not None and seconds > self.left for seconds in ending)
        if not late or len(self._running) < 2:
            return None
        return list(self._running)[-1]

    def _rest(self) -> float:
        return statistics.median(self._around) if self._around else AROUND

    def _recent(self, folder: Path) -> float | None:
        """Seconds of an epoch at the present load."""
        timed = _epochs(folder)[self._running[folder].judged_from :]
        return statistics.fmean(timed[-_ENOUGH:]) if len(timed) >= _ENOUGH else None

    def _ends_in(self, folder: Path) -> float | None:
        each = self._recent(folder)
        if each is None:
            return None
        return (_planned(folder)[0] - len(_epochs(folder))) * each + self._rest()

    def _scale(self, folder: Path) -> float | None:
        """Measured by declared seconds of a running run."""
        (epochs, declared), each = _planned(folder), self._recent(folder)
        return None if declared is None or each is None else (epochs * each + AROUND) / declared


def _planned(folder: Path) -> tuple[int, float | None]:
    """Epochs and declared seconds of a run."""
    planned = json.loads((folder / PLANNED).read_text())
    epochs = 0 if planned["baseline"] else planned["config"]["max_epochs"]
    minutes: float | None = planned["minutes"]
    return epochs, None if minutes is None else 60 * minutes


def _epochs(folder: Path) -> Sequence[float]:
    """Seconds of each epoch that was timed, in their order."""
    by_number = {line["epoch"]: line["seconds"] for line in read_jsonl(folder / EPOCHS)}
    return [by_number[number] for number in sorted(by_number)]
