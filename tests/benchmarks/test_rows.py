"""Every row runs at a tiny size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.speed import peers
from benchmarks.speed.effort import Effort
from benchmarks.speed.operation import NEEDS_GPU, Case, Goal, Setup
from benchmarks.speed.rows import ROWS, in_batch, queue_loss, training
from benchmarks.speed.turns import race_trainers

TINY = Effort(rounds=1, warm=1, shrink=64, compiled=False)
TRAINING = ("steps", "epochs", "waits")
"""A dozen runs each; below on fewer."""


@pytest.mark.parametrize("name", [n for n in ROWS if n not in TRAINING])
def test_row(name: str) -> None:
    findings, details = ROWS[name].measure(TINY)
    assert findings
    assert details
    for finding in findings:
        if finding.measured is None:
            reasons = (NEEDS_GPU, "not compiled", "peer not installed", "not implemented")
            assert finding.note.startswith(reasons), finding
    assert any(f.measured is not None for f in findings)


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FAMILIES", {"mocov2plus": ("pcl",)})
    findings, details = training.steps(TINY)
    assert [f.label for f in findings] == ["step of pcl over mocov2plus"]
    assert findings[0].measured is not None
    assert set(details["mocov2plus"]) == {"mocov2plus", "pcl", "again"}


def test_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EPOCHS", {"pcl, bank": 1.05})
    findings, _ = training.epochs(TINY)
    assert [f.label for f in findings] == ["epoch of pcl, bank over mocov2plus"]
    assert findings[0].measured is not None


def test_a_wait_of_the_host_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {name: training.RUNS[name] for name in ("nnclr", "nnclr_symmetric")}
    monkeypatch.setattr(training, "RUNS", runs)
    monkeypatch.setattr(training, "FAMILIES", {"nnclr": ("nnclr_symmetric",)})
    findings, details = training.waits(TINY)
    # solo-learn reads the pointer of its queue.
    assert details["nnclr"]["waits"]
    assert details["nnclr_symmetric"]["waits"] == []
    assert details["nnclr"]["mib"] > 0
    assert findings[-1].verdict == "met"


def test_a_failing_run_ends_the_race() -> None:
    runs = {"good": ("simclr", ()), "bad": ("simclr", ("no_such_key=1",))}
    with pytest.raises(Exception, match="no_such_key"):
        race_trainers(TINY, runs, per_epoch=False, rounds=2)


def test_a_missing_peer_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed", lambda name: name != "lightly")
    findings, _ = queue_loss.ROW.cases[0].measure(TINY)
    of_lightly = [f for f in findings if f.peer == "lightly"]
    assert [f.verdict for f in of_lightly] == ["not measured here"]
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


def test_plain_forms_are_the_formulas() -> None:
    torch.manual_seed(0)
    effort: Any = Effort(shrink=16, compiled=False)
    works = in_batch.setup(effort, 512).works
    for ours, plain in (("ours", "plain debiased"), ("hard negatives", "plain hard")):
        torch.testing.assert_close(works[ours](), works[plain](), rtol=1e-4, atol=1e-6)
