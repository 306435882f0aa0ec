"""A run that a signal ends writes where it stands first."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop

from solo_ext.core.errors import StoppedBySignal
from solo_ext.data.workers import JOB_SIGNALS as SIGNALS
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.run_dir import METRICS, checkpoints
from tests import forks
from tests.conftest import MakeConfig
from tests.lab.training.same_run import command_of, same_weights, train, whole_run
from tests.scripts import run_script

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
pytestmark = [pytest.mark.fault, posix]
STEPS = 2
"""Steps per epoch."""
GO_ON = "--resume continues from the last checkpoint"


class SignalAt(Callback):
    """Sends this process a signal within the step that follows ``step`` others."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "step"), [*zip(SIGNALS, (STEPS, 2 * STEPS - 1, STEPS), strict=True)], ids=str
)
def test_saved_then_stopped(
    step: int, number: signal.Signals, make_config: MakeConfig, tmp_path: Path
) -> None:
    """And the resumed run is the uninterrupted one; a last step is saved with its epoch."""
    config = make_config("nnclr_symmetric", max_epochs=4, checkpoint={"frequency": 100})
    handlers = [signal.getsignal(n) for n in SIGNALS]
    whole = whole_run(config)
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    run = tmp_path / "parts"
    with pytest.raises(StoppedBySignal, match=f"{number.name} after optimiser step {step + 1}"):
        train(config, run, callbacks=[SignalAt(step, number)])
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    (held,) = [c for c in checkpoints(run) if c.epoch == 1]
    assert held.step == (None if step == 2 * STEPS - 1 else step + 1)
    resume(run)
    assert same_weights(whole, run)


def test_after_the_last_step_there_is_nothing_to_stop(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    end = SignalAt(STEPS - 1, signal.SIGTERM)
    assert train(make_config("simclr", max_epochs=1), tmp_path / "run", callbacks=[end]).epochs == 1


def test_ctrl_c_while_a_finished_run_is_taken_down(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would do it twice, which fails."""
    teardown = _FitLoop.teardown

    def interrupted(loop: _FitLoop) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        teardown(loop)

    monkeypatch.setattr(_FitLoop, "teardown", interrupted)
    assert train(make_config("simclr", max_epochs=1), tmp_path / "run").epochs == 1


def outside_a_job() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}


@contextlib.contextmanager
def in_a_terminal(
    config: dict[str, Any], folder: Path, awaited: str, **environment: str
) -> Iterator[forks.Fork]:
    """``solo-ext pretrain`` with the run directory ``run``, in a process group of its own.

    Args:
        config: of the run.
        folder: where it is started.
        awaited: files of the run directory, one of which has to be there first.
        environment: variables besides those of this process, without SLURM's.
    """
    words = command_of(config, folder, "run")
    started = forks.start(*forks.SOLO_EXT, *words, cwd=folder, env=outside_a_job() | environment)
    try:
        while not list((folder / "run").glob(awaited)):
            assert started.poll() is None
            time.sleep(0.002)
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def queue_that(answers: str, folder: Path) -> str:
    """The ``PATH`` with a ``scontrol`` that runs this line."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\n{answers}\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    return f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "job", "asked"),
    [
        (
            "SIGUSR1",
            {"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"},
            "requeue 17_3\n",
        ),
        ("SIGTERM", {"SLURM_JOB_ID": "17"}, ""),
        ("SIGUSR1", {}, ""),
    ],
    ids=["array", "pre-empted", "no-job"],
)
def test_command_line(
    number: str, job: dict[str, str], asked: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A line on standard error, the exit code of the signal, and the queue where there is one."""
    config = make_config("simclr", max_epochs=1000, checkpoint={"every_n_steps": 1})
    path = queue_that(f'echo "$@" >> {tmp_path}/asked', tmp_path)
    with in_a_terminal(config, tmp_path, "*.ckpt", PATH=path, **job) as started:
        started.send_signal(signal.Signals[number])
        _, shown = started.communicate(timeout=120)
    assert started.returncode == 128 + signal.Signals[number]
    last = shown.strip().splitlines()[-1]
    assert last.startswith(f"solo-ext: stopped by {number} after optimiser step ")
    resumes = f"`solo-ext pretrain --resume {tmp_path / 'run'}` goes on"
    then = "the job is requeued" if asked else resumes
    assert last.endswith(then)
    assert "Traceback" not in shown
    found = tmp_path / "asked"
    assert (found.read_text() if found.is_file() else "") == asked


@pytest.mark.slow
def test_no_process_ends_before_the_first_has_saved_and_asked(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Launchers kill the others when one ends: here the queue takes its time to answer."""
    config = make_config("simclr", max_epochs=1000, devices=2, strategy="ddp")
    config["optimizer"]["batch_size"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = queue_that(f"sleep 1\ndate +%s.%N > {tmp_path}/asked", tmp_path)
    environment = outside_a_job() | {"PATH": path, "SLURM_JOB_ID": "17"}
    run_script(Path(__file__).with_name("stopped_run.py"), tmp_path, environment=environment)
    asked = float((tmp_path / "asked").read_text())
    for rank in range(2):
        ended, _, said = (tmp_path / f"rank-{rank}").read_text().partition(" ")
        assert float(ended) > asked, rank
        assert said.startswith("stopped by SIGUSR1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "method"), [(signal.SIGTERM, "forkserver"), (signal.SIGINT, None)], ids=str
)
def test_sent_to_workers_too(
    number: signal.Signals, method: str | None, make_config: MakeConfig, tmp_path: Path
) -> None:
    """As clusters do: the step at hand still gets its batch, and the run saves."""
    data = {"num_workers": 2, "start_method": method}
    config = make_config("simclr", max_epochs=1000, data=data, checkpoint={"frequency": 1000})
    with in_a_terminal(config, tmp_path, "*.ckpt") as started:
        os.killpg(started.pid, number)
        _, shown = started.communicate(timeout=120)
    run = tmp_path / "run"
    assert started.returncode == 128 + number, shown
    assert "Traceback" not in shown
    assert len(list(run.glob("*.ckpt"))) == 1
    assert checkpoints(run)[-1].epoch > 0


@pytest.mark.slow
def test_ctrl_c_in_the_first_epoch(make_config: MakeConfig, tmp_path: Path) -> None:
    """Twice, to all processes, as a terminal sends it: what was begun to be saved is saved."""
    config = make_config(
        "simclr",
        max_epochs=2,
        optimizer={"batch_size": 2},
        augmentations=[{"crop_size": 64, "num_crops": 2}],
        data={"num_workers": 2},
        log_every_n_steps=1,
    )
    run = tmp_path / "run"
    with in_a_terminal(config, tmp_path, METRICS) as started:
        for _ in range(2):
            os.killpg(started.pid, signal.SIGINT)
        _, shown = started.communicate(timeout=120)
    assert started.returncode == 130, shown
    (held,) = checkpoints(run)
    assert (held.epoch, held.step is None) == (0, False)
    answer, last = [line for line in shown.splitlines() if line.startswith("solo-ext: ")]
    assert answer.startswith("solo-ext: Ctrl-C: what is at hand is finished and saved first")
    assert last == (
        f"solo-ext: stopped by SIGINT after optimiser step {held.step}, which is saved; "
        f"`solo-ext pretrain --resume {run}` goes on"
    )
    assert "Traceback" not in shown


@pytest.mark.slow
def test_ctrl_c_without_checkpoints(make_config: MakeConfig, tmp_path: Path) -> None:
    """There is nobody to save; the line says so."""
    config = make_config("simclr", max_epochs=1000, checkpoint={"enabled": False})
    with in_a_terminal({**config, "log_every_n_steps": 1}, tmp_path, METRICS) as started:
        os.killpg(started.pid, signal.SIGINT)
        _, shown = started.communicate(timeout=120)
    assert started.returncode == 130, shown
    last = shown.splitlines()[-1]
    assert last == "solo-ext: stopped by SIGINT; nothing is saved yet: start it again"
    assert "Traceback" not in shown


def wait_until_idle(process: psutil.Process) -> None:
    """Until it has computed next to nothing for half a second: it waits in a library's code."""
    used, before = sum(process.cpu_times()[:2]), -1.0
    while used - before > 0.05:
        time.sleep(0.5)
        used, before = sum(process.cpu_times()[:2]), used


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.matrix)],
    ids=str,
)
def test_another_process_hangs(
    number: signal.Signals, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The run says that it waits, ends by a second signal, and takes the other one along."""
    config = make_config("simclr", max_epochs=1000, devices=2, strategy="ddp", log_every_n_steps=1)
    config["optimizer"]["batch_size"] = 8
    words, said = command_of(config, tmp_path, "run"), tmp_path / "stderr.txt"
    # What a fork starts has another parent.
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, *forks.SOLO_EXT, *words],
            cwd=tmp_path,
            stderr=stderr,
            start_new_session=True,
        ) as started,
    ):
        try:
            while not list((tmp_path / "run").glob("*.ckpt")):
                assert started.poll() is None
                time.sleep(0.1)
            run = psutil.Process(started.pid)
            (other,) = run.children()
            other.suspend()
            wait_until_idle(run)
            started.send_signal(number)
            latest = time.monotonic() + 60
            while "the run waits for" not in said.read_text():
                assert started.poll() is None
                assert time.monotonic() < latest, "it does not say that it waits"
                time.sleep(0.05)
            assert started.poll() is None
            started.send_signal(number)
            started.wait(timeout=10)
            other.wait(timeout=10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    shown = said.read_text()
    assert started.returncode == 128 + number, shown
    told, last, gone = [line for line in shown.splitlines() if line.startswith("solo-ext: ")]
    waits, _, how = told.partition("; ")
    # It waits between two steps, or within a backward pass.
    assert waits.removeprefix("solo-ext: the run waits for ") in (
        "the other processes",
        "an operation to end",
    )
    assert how == f"it stops after that. Send {number.name} again to end it at once; {GO_ON}"
    what = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert last.startswith(f"solo-ext: {what}")
    assert last.endswith(f"; {GO_ON}")
    assert "another process of this run is gone" in gone, "told by the other one"
    assert "Traceback" not in shown
