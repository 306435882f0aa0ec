"""A run of two processes of which one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from solo_ext.training.run_dir import checkpoints

TINY = (
    "--config-name=digits/debiased",
    "accelerator=cpu",
    "devices=2",
    "strategy=ddp",
    "backbone.kwargs.channels=[8,8,8,8]",
    "data.fraction=0.2",
    "optimizer.batch_size=32",
    "max_epochs=3",
)


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_the_other_ends_with_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    """No hang, no traceback, and no exit code of a mistake in the command line."""
    run = tmp_path / "run"
    script = str(Path(__file__).with_name("killed_rank_run.py"))
    done = ran(script, str(tmp_path), "pretrain", *TINY, "--run-dir", str(run))
    said = [line for line in done.stderr.splitlines() if line.startswith("solo-ext: ")]
    if done.returncode == -signal.SIGKILL:
        # Lightning looks after its processes every five seconds, and happened to be first.
        assert "terminated with code -9" in done.stderr
    else:
        assert done.returncode == 1, done.stderr[-3000:]
        assert len(said) == 1, done.stderr[-3000:]
        assert said[0].startswith("solo-ext: another process of this run is gone, at epoch 1, ")
        assert said[0].endswith(f"; go on with solo-ext pretrain --resume {run}")
    assert "Traceback" not in done.stderr
    assert [c.epoch for c in checkpoints(run)] == [0]
    done = ran("-m", "solo_ext.cli.main", "pretrain", "--resume", str(run))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [c.epoch for c in checkpoints(run)] == [2]
