"""Two processes that are stopped within an epoch go on as if they had not been.

The file is also the script of those processes: ``test_resume_ranks.py FOLDER``, which holds
``config.json``, or the run ``whole`` to go on with.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import checkpoints

STOP = 3
"""Batches after which the run is copied, within its second epoch of three."""
CLUSTERS = {"num_prototypes": [5], "warmup_epochs": 0, "e_step": "bank"}


@pytest.mark.slow
def test_clusters_and_bank_that_are_shared_out(
    make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A bank that lacks some images, and class weights that follow the clusters."""
    # The script itself runs where the tests cannot be imported.
    from tests.lab.training.same_run import assert_same_run
    from tests.scripts import run_script

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
    run_script(Path(__file__), tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts" / "whole"
    (found,) = checkpoints(parts)
    assert (found.epoch, found.step) == (1, STOP)
    held = torch.load(found.path, weights_only=True)["state_dict"]
    assert held["prototypes.assignments"].shape == (1, 48)
    assert 0 < held["bank.filled"].sum() < 48
    run_script(Path(__file__), tmp_path / "parts")
    assert_same_run(whole, parts)


class Copy(Callback):
    """Leaves in a folder ``parts`` what a machine that fails then would leave."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.fit_loop.epoch_loop.total_batch_idx == STOP:
            shutil.copytree(self.run_dir, self.run_dir.parent / "parts" / "whole")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_dir = folder / "whole"
    torch.set_num_threads(1)
    if (folder / "config.json").exists():
        config = json.loads((folder / "config.json").read_text())
        pretrain(prepare(config), run_dir=run_dir, callbacks=[Copy(run_dir)], show_progress=False)
    else:
        resume(run_dir)
