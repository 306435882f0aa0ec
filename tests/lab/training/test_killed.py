"""A process that is killed: the run, a worker, or one of two; through the command line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from solo_ext.lab.training.run_dir import METRICS, checkpoints
from tests import forks
from tests.conftest import MakeConfig
from tests.lab.training.same_run import assert_same_run, command_of, whole_run

pytestmark = [pytest.mark.fault, pytest.mark.slow]
RESUME = (*forks.SOLO_EXT, "pretrain", "--resume")


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    """Of a run with workers; without any it is a cell of the matrix, at random moments."""
    given = {"optimizer": {"batch_size": 4}, "data": {"num_workers": 2}, "max_epochs": 3}
    return make_config("debiased", log_every_n_steps=1, **given)


def started(config: dict[str, Any], parts: Path) -> forks.Fork:
    return forks.start(*forks.SOLO_EXT, *command_of(config, parts.parent, parts))


def assert_goes_on(config: dict[str, Any], parts: Path) -> None:
    assert forks.run(*RESUME, parts).returncode == 0
    assert_same_run(whole_run(config), parts)


def test_kill_9_within_an_epoch(config: dict[str, Any], tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    victim = started(config | {"checkpoint": {"every_n_steps": 1}}, parts)
    while not list(parts.glob("*-ep=1-step=*.ckpt")):
        assert victim.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert not list(parts.glob("*-ep=2.ckpt")), "the run was over before it was killed"
    assert_goes_on(config, parts)


def data_workers(pid: int) -> list[int]:
    """Processes that were forked from one to load images."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if Path(f"/proc/{c}/cmdline").read_bytes() == words]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children by Linux's /proc")
def test_kill_9_of_a_data_worker(config: dict[str, Any], tmp_path: Path) -> None:
    """As the system does when memory ends: one line, a checkpoint, and the same run in the end."""
    parts = tmp_path / "parts"
    training = started(config, parts)
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
    assert_goes_on(config, parts)


TINY = (
    "accelerator=cpu",
    "devices=2",
    "strategy=ddp",
    "backbone.kwargs.channels=[8,8,8,8]",
    "backbone.kwargs.stem_width=8",
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


@pytest.mark.timeout(600)
def test_within_a_step_the_other_ends_with_one_line(tmp_path: Path) -> None:
    """Here the first is killed, from which the second was started."""
    killed(tmp_path, 0, "step", "debiased")


@pytest.mark.timeout(600)
def test_within_an_e_step_and_the_run_goes_on(tmp_path: Path) -> None:
    run = killed(tmp_path, 1, "E-step", "pcl")
    done = forks.run(*RESUME, run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [c.epoch for c in checkpoints(run)] == [2]
