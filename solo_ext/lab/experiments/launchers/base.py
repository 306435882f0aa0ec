"""What a launcher is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from solo_ext.lab.experiments.work import RECORD

TICK = 0.5
"""Seconds between two looks at the runs."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended that has no record.

    Attributes:
        folder: its run directory.
        reason: one line.
    """

    folder: Path
    reason: str


class Launcher(ABC):
    """Starts runs and waits for them."""

    @abstractmethod
    def run(
        self, folders: Sequence[Path], needs: Mapping[Path, Path], tick: Callable[[], None]
    ) -> list[Outcome]:
        """Runs every folder that holds ``planned.json``.

        Args:
            folders: run directories, in the order of their turn.
            needs: of students, the directory of the teacher's run, whose record they wait for.
            tick: called every :data:`TICK` seconds and after the last run.

        Returns:
            The runs that failed; the others go on.
        """


def is_ready(folder: Path, needs: Mapping[Path, Path]) -> bool:
    """Whether a run has what it needs."""
    return folder not in needs or (needs[folder] / RECORD).is_file()


def untaught(folder: Path, needs: Mapping[Path, Path]) -> Outcome:
    """How a student ends whose teacher has no record."""
    return Outcome(folder, f"its teacher {needs[folder].name} failed")


def last_line(log: Path) -> str:
    """What a failed process said last: its error."""
    if not log.is_file():
        return "it ended without a word"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    return said[-1].removeprefix("solo-ext: ") if said else "it ended without a word"
