"""What a time limit leaves room for."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from solo_ext.core.files import append_lines
from solo_ext.lab.experiments import pace
from solo_ext.lab.experiments.pace import AROUND, Pace
from solo_ext.lab.experiments.work import PLANNED
from solo_ext.lab.training.run_dir import EPOCHS


class Clock:
    """A clock that the tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    monkeypatch.setattr(pace, "_SAVING", 0.0)
    return made


def run(root: Path, name: str, epochs: int = 10, minutes: float | None = 2.0) -> Path:
    folder = root / name
    folder.mkdir()
    planned = {"config": {"max_epochs": epochs}, "baseline": None, "minutes": minutes}
    (folder / PLANNED).write_text(json.dumps(planned))
    return folder


def trained(folder: Path, *seconds: float) -> None:
    """Adds epochs of so many seconds."""
    file = folder / EPOCHS
    first = len(file.read_text().splitlines()) if file.is_file() else 0
    append_lines(
        file, [{"epoch": first + n, "images": 64, "seconds": s} for n, s in enumerate(seconds)]
    )


def test_declared_minutes_decide_while_nothing_is_measured(tmp_path: Path, clock: Clock) -> None:
    limit = Pace(clock.now + 120)
    first, fits, long, unknown = (
        run(tmp_path, name, minutes=minutes)
        for name, minutes in (("a", 2.0), ("b", 2.0), ("c", 2.1), ("d", None))
    )
    limit.starts(first)
    chosen = [limit.next_of([folder], idle=False) for folder in (fits, long, unknown)]
    assert chosen == [fits, None, unknown]
    clock.now += 120
    assert not any(limit.next_of([folder], idle=False) for folder in (fits, long, unknown))


def test_what_was_measured_corrects_what_was_declared(tmp_path: Path, clock: Clock) -> None:
    """Runs of this call, also those that have ended."""
    limit = Pace(clock.now + 1000)
    first, other, waiting = (run(tmp_path, name) for name in "abc")
    limit.starts(first)
    limit.starts(other)
    trained(first, 50.0, 19.5)
    assert limit.needs(waiting) == 120
    # Two more epochs of 19.5 s: ten take 195 s, and with start and evaluation twice the 120 s.
    trained(first, 19.5)
    assert limit.needs(waiting) == pytest.approx(195 + AROUND) == 240
    # The other one takes 39 s an epoch: the median of 240 and 435 s.
    trained(other, *[39.0] * 10)
    assert limit.needs(waiting) == pytest.approx(337.5)
    # Half of its epochs were trained by an earlier call.
    trained(waiting, *[9.0] * 5)
    assert limit.needs(waiting) == pytest.approx(337.5 / 2)
    # Of the last epoch at least the evaluation is left.
    trained(waiting, *[9.0] * 5)
    assert limit.needs(waiting) == AROUND


def test_a_wrong_guess_does_not_leave_the_machine_idle(tmp_path: Path, clock: Clock) -> None:
    limit = Pace(clock.now + 60)
    first, other = run(tmp_path, "a"), run(tmp_path, "b")
    short = run(tmp_path, "c", minutes=0.5)
    assert limit.next_of([first, other, short], idle=True) == short
    assert limit.next_of([first, other], idle=True) == first
    limit.starts(first)
    assert limit.next_of([other], idle=False) is None
    # It ended at once, or trained nothing: nothing is known yet.
    assert limit.next_of([other], idle=True) == other
    # Measured, it takes 5 s.
    trained(first, *[0.5] * 10)
    clock.now += 10
    assert limit.next_of([other], idle=False) == other
    clock.now += 10
    assert limit.next_of([other], idle=True) is None
    assert Pace(clock.now).next_of([other], idle=True) is None


def test_a_run_of_few_epochs_counts_when_it_is_trained(tmp_path: Path, clock: Clock) -> None:
    limit = Pace(clock.now + 100)
    first, other = (run(tmp_path, name, epochs=2) for name in "ab")
    assert limit.next_of([first, other], idle=True) == first
    limit.starts(first)
    trained(first, 3.0)
    assert limit.next_of([other], idle=False) is None
    trained(first, 2.0)
    assert limit.needs(other) == 5 + AROUND
    assert limit.next_of([other], idle=True) == other


def test_what_is_evaluated_is_neither_judged_nor_stopped(tmp_path: Path, clock: Clock) -> None:
    limit = Pace(clock.now + AROUND / 2)
    runs = [run(tmp_path, name, epochs=4) for name in "abc"]
    for folder in runs:
        limit.starts(folder)
    trained(runs[2], *[9.0] * 4)
    trained(runs[0], *[1.0] * 4)
    assert limit.superfluous(runs) is None
    # One that trains would not end in time; of the two that train the last one gives way.
    trained(runs[1], *[9.0] * 3)
    assert limit.superfluous(runs) is None
    further = run(tmp_path, "d", epochs=4)
    limit.starts(further)
    assert limit.superfluous([runs[0], further, runs[1], runs[2]]) == runs[1]


def test_without_a_limit_every_run_starts_and_none_is_stopped(tmp_path: Path) -> None:
    limit = Pace(math.inf)
    runs = [run(tmp_path, name, minutes=1e9) for name in "ab"]
    assert limit.next_of(runs, idle=True) == runs[0]
    assert limit.next_of([], idle=True) is None
    for folder in runs:
        limit.starts(folder)
        trained(folder, *[1e9] * 4)
    assert limit.next_of(runs, idle=True) == runs[0]
    assert limit.superfluous(runs) is None


def test_the_last_run_gives_way_and_then_the_others_are_judged_anew(
    tmp_path: Path, clock: Clock
) -> None:
    limit = Pace(clock.now + 200)
    runs = [run(tmp_path, name) for name in "abc"]
    for folder in runs:
        limit.starts(folder)
    trained(runs[0], 30.0, 20.0)
    assert limit.superfluous(runs) is None
    # 7 epochs of 23 s and the evaluation take longer than 200 s; the first epoch does not count.
    trained(runs[0], 26.0)
    assert limit.superfluous(runs) == runs[2]
    left = runs[:2]
    limit.load_changes(left)
    # The epoch at hand began at the old load: it does not count.
    trained(runs[0], 19.0, 12.0)
    assert limit.superfluous(left) is None
    trained(runs[0], 12.0)
    assert limit.superfluous(left) is None
    # Three epochs of 40 s are too many for 120 s with an evaluation.
    clock.now += 80
    trained(runs[1], *[40.0] * 7)
    assert limit.superfluous(left) == runs[1]
    trained(runs[0], *[99.0] * 3)
    assert limit.superfluous(runs[:1]) is None
