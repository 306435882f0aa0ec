"""A run of two processes of which one is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from solo_ext.lab.training.run_dir import checkpoints
from tests import forks

TINY = (
    "accelerator=cpu",
    "devices=2",
    "strategy=ddp",
    "backbone.kwargs.channels=[8,8,8,8]",
    "data.fraction=0.2",
    "optimizer.batch_size=32",
    "max_epochs=3",
)
MORE = {"pcl": ("method_kwargs.warmup_epochs=0", "method_kwargs.num_prototypes=[10,20]")}


def killed(folder: Path, rank: int, place: str, config: str) -> Path:
    """A run that lost a process: no hang, no traceback, no exit code of a mistake."""
    run = folder / "run"
    script = [str(Path(__file__).with_name("killed_rank_run.py")), str(folder), str(rank), place]
    words = [f"--config-name=digits/{config}", *TINY, *MORE.get(config, ())]
    done = forks.run("-W", "ignore", *script, "pretrain", *words, "--run-dir", run)
    assert done.returncode == (1 if rank else -signal.SIGKILL), done.stderr[-3000:]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("solo-ext: ")]
    assert said.startswith("solo-ext: another process of this run is gone or hangs, at epoch 1, ")
    assert said.endswith(f"; `solo-ext pretrain --resume {run}` goes on")
    assert "Traceback" not in done.stderr
    assert [c.epoch for c in checkpoints(run)] == [0]
    return run


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_within_a_step_the_other_ends_with_one_line(rank: int, tmp_path: Path) -> None:
    """The first one, too, from which the second was started."""
    killed(tmp_path, rank, "step", "debiased")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_within_an_e_step_and_the_run_goes_on(tmp_path: Path) -> None:
    run = killed(tmp_path, 1, "E-step", "pcl")
    done = forks.run(*forks.SOLO_EXT, "pretrain", "--resume", run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [c.epoch for c in checkpoints(run)] == [2]
