"""The lines about the epochs of a run: what they count, and of which run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.core.files import append_lines, read_jsonl
from solo_ext.lab.training.checkpoints import RunCheckpoint
from solo_ext.lab.training.epoch_log import read_epochs
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import EPOCHS, METRICS, checkpoints
from tests.conftest import MakeConfig
from tests.lab.training.resumable import KillAt
from tests.lab.training.same_run import train, train_killed


class Clock:
    """Stands still; only what a test lets take time does."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def during(self, **seconds: float) -> LambdaCallback:
        """A callback in whose hooks so many seconds pass."""
        return LambdaCallback(**{hook: self.passes(spent) for hook, spent in seconds.items()})

    def passes(self, seconds: float) -> Callable[..., None]:
        def spend(*_: Any) -> None:
            self.now += seconds

        return spend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("solo_ext.lab.training.epoch_log.time", made)
    return made


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    """Two epochs of six steps, a checkpoint after each step."""
    held = {"every_n_steps": 1}
    return make_config("simclr", optimizer={"batch_size": 8}, checkpoint=held, max_epochs=2)


@pytest.mark.parametrize("show_progress", [False, True])
def test_every_run_has_a_line_per_epoch(
    show_progress: bool, config: dict[str, Any], tmp_path: Path
) -> None:
    run_dir, begin = tmp_path / "run", time.monotonic()
    pretrain(prepare(config), run_dir=run_dir, show_progress=show_progress)
    lines = read_jsonl(run_dir / EPOCHS)
    assert [(line["epoch"], line["images"]) for line in lines] == [(0, 48), (1, 48)]
    assert all(line["resident"] > 1e8 for line in lines)
    assert all(line["seconds"] > 0 for line in lines)
    assert sum(line["seconds"] for line in lines) < time.monotonic() - begin


def test_what_counts(
    config: dict[str, Any],
    images: Path,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An E-step, the steps and waiting for their data; an evaluation only in what lines show."""

    def measured(*_: Any) -> dict[str, float]:
        clock.now += 1000
        return {}

    def start(_: Any, module: Any) -> None:
        # Where PCL's E-step is.
        module.on_train_epoch_start = clock.passes(1)

    monkeypatch.setattr("solo_ext.lab.evaluation.online.OnlineEvaluation._numbers", measured)
    config["data"]["val_path"], config["online_eval"] = str(images), {"every_n_epochs": 1}
    config["max_epochs"] = 3
    spent = clock.during(on_train_batch_start=0.25, on_before_backward=0.5, on_validation_start=100)
    callbacks = [spent, LambdaCallback(on_train_start=start)]
    pretrain(prepare(config), run_dir=tmp_path / "run", callbacks=callbacks)
    assert [line["seconds"] for line in read_epochs(tmp_path / "run")] == [5.5] * 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "  epoch " in line]
    shown = [line.split("  ")[-4:] for line in lines]
    # 1105.5 s are 18 min; what was evaluated before training is no part of an epoch.
    each = ["8.727 images/s", "data 45%", "18 min"]
    assert shown[:2] == [[*each, "37 min left"], [*each, "18 min left"]]
    assert shown[2][1:] == each


def test_images_are_those_that_were_trained(config: dict[str, Any], tmp_path: Path) -> None:
    """Of every batch: four and two of an epoch make a step."""
    result = train({**config, "accumulate_grad_batches": 4}, tmp_path / "run")
    assert result.images_per_second * result.seconds == pytest.approx(96)
    assert [line["images"] for line in read_epochs(result.run_dir)] == [48, 48]


def test_an_epoch_in_two_parts_has_the_images_and_seconds_of_both(
    config: dict[str, Any], tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = clock.during(on_train_batch_start=0.5)
    with pytest.raises(RuntimeError, match="killed"):
        train(config, tmp_path / "run", callbacks=[waits, KillAt(4)])
    clock.now += 1000
    resume(tmp_path / "run", callbacks=[clock.during(on_before_backward=0.25)])
    lines = read_jsonl(tmp_path / "run" / EPOCHS)
    assert [(line["images"], line["seconds"]) for line in lines] == [(48, 2.5), (48, 1.5)]
    shown = [line for line in capsys.readouterr().err.splitlines() if "  epoch " in line]
    # What is shown is of this process.
    assert all("  32 images/s  data 0%  " in line for line in shown)


@pytest.mark.parametrize(("saved", "lines"), [(True, [0, 1]), (False, [0, 0, 1])])
def test_killed_at_the_end_of_an_epoch(
    saved: bool,
    lines: list[int],
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An epoch that is saved has its line; one that is repeated gets another."""
    on_train_epoch_end = RunCheckpoint.on_train_epoch_end

    def killed(*given: Any) -> None:
        if saved:
            on_train_epoch_end(*given)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoint, "on_train_epoch_end", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(config, tmp_path / "run")
    resume(tmp_path / "run")
    assert [line["epoch"] for line in read_jsonl(tmp_path / "run" / EPOCHS)] == lines
    assert [line["images"] for line in read_epochs(tmp_path / "run")] == [48, 48]


@pytest.mark.parametrize(("killed", "timed"), [(4, [1]), (6, [1]), (8, [])])
def test_an_epoch_that_an_earlier_version_began_has_no_line(
    killed: int, timed: list[int], config: dict[str, Any], tmp_path: Path
) -> None:
    """Its checkpoint does not tell how long the first part took; the next epoch is whole."""
    run_dir = tmp_path / "run"
    train_killed(config, run_dir, killed)
    (run_dir / EPOCHS).unlink(missing_ok=True)
    for held in checkpoints(run_dir, previous=True):
        state = torch.load(held.path, weights_only=True)
        del state["callbacks"]["EpochLog"]
        torch.save(state, held.path)
    resume(run_dir)
    assert [line["epoch"] for line in read_epochs(run_dir)] == timed


def test_a_checkpoint_of_an_earlier_benchmark_has_the_times_of_its_epoch(
    config: dict[str, Any], tmp_path: Path, clock: Clock
) -> None:
    run_dir = tmp_path / "run"
    train_killed(config, run_dir, 4)
    for held in checkpoints(run_dir, previous=True):
        state = torch.load(held.path, weights_only=True)
        state["callbacks"]["EpochLog"] = {"seconds": 1000.0, "batches": 4}
        torch.save(state, held.path)
    resume(run_dir, callbacks=[clock.during(on_before_backward=0.5)])
    lines = read_epochs(run_dir)
    assert [(line["images"], line["seconds"]) for line in lines] == [(48, 1001), (48, 3)]


def test_a_run_from_the_start_keeps_no_lines_of_another(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config["checkpoint"] = {"enabled": False}
    for epochs in (2, 1):
        train({**config, "max_epochs": epochs}, tmp_path / "run")
    assert [line["epoch"] for line in read_epochs(tmp_path / "run")] == [0]
    assert {line["epoch"] for line in read_jsonl(tmp_path / "run" / METRICS)} == {0}


def test_lines_of_a_killed_process_and_of_another_program(tmp_path: Path) -> None:
    whole = {"epoch": 1, "images": 64, "seconds": 2.0}
    append_lines(tmp_path / EPOCHS, [whole | {"seconds": 9.0}, {"epoch": {}}, {"epoch": 2}, whole])
    with (tmp_path / EPOCHS).open("a") as file:
        file.write('{"epoch": 3, "ima')
    assert read_epochs(tmp_path) == [whole]
