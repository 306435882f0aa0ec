"""Every row runs at a tiny size."""

from __future__ import annotations

import importlib.util
import math
import os
import threading
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import operation, trainers
from benchmarks.measure import Work
from benchmarks.operation import EXACT, Case, Goal, Setup, relative
from benchmarks.record import Effort
from benchmarks.rows import CASES, ROWS, counts, import_cost, loading, queue_loss, training
from benchmarks.trainers import TEACHERS, race_trainers, train
from tests import forks

TINY = Effort(rounds=1, warm=1, shrink=64, compiled=False)
ELSEWHERE = ("steps", "epochs", "memory", "scale", "counts")
"""A dozen runs each, or millions of names; below and in `test_scale.py` on fewer, and all of the
last in `test_counts.py`."""
SLOW = ("import", "embed", "loading")


def in_a_fork(*words: str) -> str:
    """What a program prints; what it imports has been imported before."""
    done = forks.run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


SMALLER: dict[str, tuple[Any, str, Any]] = {
    "import": (import_cost, "python", in_a_fork),
    "loading": (loading, "BATCH", 16),
}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of four steps."""
    monkeypatch.setattr(trainers, "STEPS_PER_EPOCH", 4)
    monkeypatch.setattr(trainers, "training_images", partial(trainers.training_images, steps=4))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n
        for n in ROWS
        if n not in ELSEWHERE
    ],
)
def test_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in SMALLER:
        monkeypatch.setattr(*SMALLER[name])
    findings, details = ROWS[name](TINY)
    assert findings
    assert details or name in ("compiled", "graphs")
    for finding in findings:
        if finding.measured is None:
            reasons = ("not compiled", "peer not installed", "needs a GPU")
            assert finding.note.startswith(reasons), finding
        if finding.difference is not None and finding.most_difference == EXACT:
            assert finding.difference <= EXACT, finding
    assert name in ("compiled", "graphs") or any(f.measured is not None for f in findings)


@pytest.mark.parametrize(
    "case", [c for cases in CASES.values() for c in cases], ids=lambda c: c.label
)
def test_launches(case: Case) -> None:
    """No more than what the goals say, and nothing waits."""
    for finding in case.launches(Effort()):
        assert finding.verdict == "met", finding


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
def test_distilled_steps_have_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FAMILIES", {"seed": ("protoseed",)})
    monkeypatch.setenv(TEACHERS, "elsewhere")
    (finding,) = training.steps(TINY).findings
    assert (finding.label, finding.peer) == ("step of protoseed over seed", "seed")
    assert finding.measured is not None
    assert str(finding.target) == "<= 1.01 x"
    assert os.environ[TEACHERS] == "elsewhere"


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
def test_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EPOCHS", {"pcl, bank": {"cpu": 1.05, "cuda": 1.03}})
    findings, _ = training.epochs(TINY)
    assert [f.label for f in findings] == ["epoch of pcl, bank over mocov2plus"]
    assert findings[0].measured is not None


def test_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FAMILIES", {"simclr": ("hard_negative",)})
    (finding,), details = training.memory(TINY)
    assert finding.measured == details["hard_negative"]["mib"] / details["simclr"]["mib"]
    assert finding.measured == pytest.approx(1, abs=0.2)


def test_a_failing_run_ends_the_race() -> None:
    runs = {"good": ("simclr", ()), "bad": ("simclr", ("no_such_key=1",))}
    with pytest.raises(Exception, match="no_such_key"):
        race_trainers(TINY, runs, per_epoch=False, rounds=2)


@pytest.mark.slow
@pytest.mark.skipif(
    "SOLO_LEARN_ROOT" not in os.environ, reason="knn_eval of 1.0.2 can be recorded, in emulation"
)
def test_a_run_that_fails_keeps_no_other_one_with_graphs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[int] = set()

    def note(*args: Any) -> None:
        threads.add(threading.get_ident())
        train(*args)

    monkeypatch.setattr(trainers, "train", note)
    monkeypatch.setitem(training.CHANGES, "simclr, bad", ("no_such_key=1",))
    off = ("knn_eval.enabled=true",)
    monkeypatch.setitem(training.CHANGES, "simclr, off", off)
    names = "simclr, bad", "simclr, off", "hard_negative"
    monkeypatch.setattr(training, "FAMILIES", {"simclr": names, "nnclr": ("nnclr_symmetric",)})
    with counts.free_replays():
        findings, _ = training.graphs_of(TINY, "simclr")
        beside, ours = training.graphs_of(TINY, "nnclr")[0]
    assert threads == {threading.get_ident()}
    assert (beside.measured, beside.note) == (None, "its steps cannot be recorded")
    assert ours.measured is not None
    assert ours.peer == "nnclr of solo-learn, without graphs"
    base, bad, without, good = findings
    assert without.measured is None
    assert "performance.graphs" in without.note
    assert base.measured is not None
    assert good.measured is not None
    assert good.again is not None
    assert (bad.measured, bad.verdict) == (None, "not measured")
    assert "no_such_key" in bad.note


def test_a_missing_peer_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *of: None if name == "lightly" else found(name, *of),
    )
    findings, _ = queue_loss.CASES[0].measure(TINY)
    of_lightly = [f for f in findings if f.peer == "lightly"]
    assert [f.verdict for f in of_lightly] == ["not measured"]
    assert of_lightly[0].note == "peer not installed: lightly"


def test_a_ratio_is_that_of_the_peer_to_ours() -> None:
    def make(_: Effort) -> Setup:
        few, many = torch.randn(200, 200), torch.randn(600, 600)
        return Setup({"ours": lambda: few @ few, "peer": lambda: many @ many})

    case = Case("product", make, (Goal("peer", 2.0, 2.0, most_mib=0.1),))
    time, memory, most = case.measure(Effort(rounds=3, warm=2)).findings
    assert time.measured is not None
    assert time.measured > 2
    assert time.again is not None
    # 600 x 600 over 200 x 200.
    assert memory.measured == time.memory == pytest.approx(9)
    assert [time.verdict, memory.verdict, most.verdict] == ["met", "met", "missed"]


@pytest.mark.parametrize(("off", "verdict"), [(0.0, "met"), (2e-5, "missed"), (math.nan, "missed")])
def test_another_result_is_missed_however_fast(off: float, verdict: str) -> None:
    def make(_: Effort) -> Setup:
        few, many = torch.ones(200, 200), torch.ones(600, 600)
        return Setup(
            {
                "ours": lambda: (few @ few)[0, 0] * (1 + off),
                "peer": lambda: (many @ many)[0, 0] / 3,
            },
            relative,
        )

    case = Case("product", make, (Goal("peer", 2.0, most_difference=EXACT),))
    (finding,) = case.measure(Effort(rounds=3, warm=2)).findings
    assert finding.difference == pytest.approx(off, abs=2e-6, nan_ok=True)
    assert finding.verdict == verdict


def test_what_is_drawn_is_compared_with_given_draws() -> None:
    def make(_: Effort) -> Setup:
        works = {name: lambda: torch.rand(3) for name in ("ours", "peer")}
        given = {name: lambda: torch.ones(3) for name in works}
        return Setup(dict(works), relative, given)

    case = Case("draws", make, (Goal("peer", 0, most_difference=0),))
    (finding,) = case.measure(Effort(rounds=1, warm=1)).findings
    assert finding.difference == 0


def test_equals_are_those_of_the_lines_variant() -> None:
    def make(_: Effort) -> Setup:
        return Setup({name: lambda: sum(range(100)) for name in ("ours", "other", "peer")})

    def timer(work: Work, repeats: int) -> float:
        return next(times)

    goals = (Goal("peer", 1), Goal("peer", 1, ours="other"))
    case = Case("sums", make, goals)
    # ours, other, peer, ours again, other again.
    times = iter([1.0, 2.0, 4.0, 1.5, 8.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operation, "by_clock", lambda: timer)
        first, second = case.measure(Effort(rounds=1, warm=0)).findings
    assert [first.again, second.again] == [1.5, 4.0]
    assert [first.measured, second.measured] == [4.0, 2.0]
