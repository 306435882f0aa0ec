"""A run of PCL that is killed at a hundred moments of its life."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from solo_ext.config.compose import compose
from tests.lab.training.same_run import assert_same_run
from tests.matrix.killing import Runs
from tests.matrix.record import note_kills

pytestmark = pytest.mark.matrix
KILLS = 100
CHANGES = [
    "max_epochs=60",
    "accelerator=cpu",
    "backbone.kwargs.channels=[8,8,8,8]",
    "backbone.kwargs.stem_width=8",
    "data.fraction=0.3",
    "data.augmentation=batch",
    "optimizer.batch_size=70",
    "method_kwargs.queue_size=300",
    "method_kwargs.warmup_epochs=5",
    "checkpoint.every_n_steps=1",
    "online_eval.every_n_epochs=20",
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
@pytest.mark.timeout(3600)
def test_it_ends_as_if_nobody_had(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Same weights, same optimiser, same queue and prototypes, same log, to the last bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs = Runs(tmp_path, compose("digits/pcl", CHANGES))
    how = runs.kill_at_random(whole, parts, KILLS, 0.95)
    assert_same_run(whole, parts)
    assert not list(parts.glob("*.unreadable"))
    if request.config.option.markexpr == "matrix":
        note_kills(KILLS, how)
