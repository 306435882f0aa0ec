"""Two processes that are stopped within an epoch go on as if they had not been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from solo_ext.lab.training.run_dir import checkpoints
from tests.conftest import MakeConfig
from tests.lab.training.resume_ranks_run import STOP
from tests.lab.training.same_run import assert_same_run
from tests.scripts import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("resume_ranks_run.py")
CLUSTERS = {"num_prototypes": [5], "warmup_epochs": 0, "e_step": "bank"}


def test_clusters_and_bank_that_are_shared_out(make_config: MakeConfig, tmp_path: Path) -> None:
    """A bank that lacks some images, and class weights that follow the clusters."""
    config = make_config(
        "metric",
        method_kwargs={"loss": "arcface_loss_func", "classes": "cluster", "clusters": CLUSTERS},
        # Of 24 images of a process four are left out of every epoch.
        optimizer={"batch_size": 10, "lr": 0.05},
        checkpoint={"every_n_steps": 1},
        devices=2,
        strategy="ddp",
        max_epochs=3,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    run_script(SCRIPT, tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts" / "whole"
    (found,) = checkpoints(parts)
    assert (found.epoch, found.step) == (1, STOP)
    held = torch.load(found.path, weights_only=True)["state_dict"]
    assert held["prototypes.assignments"].shape == (1, 48)
    assert 0 < held["bank.filled"].sum() < 48
    run_script(SCRIPT, tmp_path / "parts")
    assert_same_run(whole, parts)
