"""A process that is killed within an epoch, the run's or a worker's, through the command line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.lab.training.run_dir import METRICS, checkpoints
from tests import forks
from tests.lab.training.same_run import assert_same_run

MakeConfig = Callable[..., dict[str, Any]]
PRETRAIN = (*forks.SOLO_EXT, "pretrain")


@pytest.mark.slow
@pytest.mark.fault
def test_kill_9_within_an_epoch(make_config: MakeConfig, tmp_path: Path) -> None:
    """With workers; without any it is a cell of the matrix, at random moments."""
    config = make_config(
        "debiased",
        optimizer={"batch_size": 4},
        data={"num_workers": 2},
        checkpoint={"every_n_steps": 1},
        max_epochs=3,
    )
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    start = [*PRETRAIN, "--config-path", tmp_path, "--config-name", "mine", "--run-dir"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert forks.run(*start, whole).returncode == 0

    victim = forks.start(*start, parts)
    while not list(parts.glob("*-ep=1-step=*.ckpt")):
        assert victim.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert not list(parts.glob("*-ep=2.ckpt")), "the run was over before it was killed"

    assert forks.run(*PRETRAIN, "--resume", parts).returncode == 0
    assert_same_run(whole, parts)


def data_workers(pid: int) -> list[int]:
    """Processes that were forked from one to load images."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if Path(f"/proc/{c}/cmdline").read_bytes() == words]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children by Linux's /proc")
def test_kill_9_of_a_data_worker(make_config: MakeConfig, tmp_path: Path) -> None:
    """As the system does when memory ends: one line, a checkpoint, and the same run in the end."""
    config = make_config(
        "debiased",
        optimizer={"batch_size": 4},
        data={"num_workers": 2},
        log_every_n_steps=1,
        max_epochs=3,
    )
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    start = [*PRETRAIN, "--config-path", tmp_path, "--config-name", "mine", "--run-dir"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert forks.run(*start, whole).returncode == 0

    training = forks.start(*start, parts)
    try:
        while not (parts / METRICS).is_file():
            assert training.poll() is None, "the run ended before its worker could be killed"
            time.sleep(0.002)
        os.kill(data_workers(training.pid)[0], signal.SIGKILL)
        _, shown = training.communicate(timeout=120)
    finally:
        training.kill()
    assert training.returncode == 1, shown[-3000:]
    assert "Traceback" not in shown, shown[-3000:]
    (line,) = [line for line in shown.splitlines() if line.startswith("solo-ext: ")]
    assert line.startswith("solo-ext: a data worker was killed (SIGKILL), as the system does when")
    assert f"is saved; `solo-ext pretrain --resume {parts}` goes on" in line
    assert [held.step is None for held in checkpoints(parts)] == [False]

    assert forks.run(*PRETRAIN, "--resume", parts).returncode == 0
    assert_same_run(whole, parts)
