"""Errors that nobody foresaw, and what a run says and keeps of what came before them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.core.errors import UserError
from solo_ext.data.folders import ImageFiles
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.run_dir import ENVIRONMENT, checkpoints
from tests.lab.training.same_run import assert_same_run, train, train_killed

pytestmark = pytest.mark.fault
MakeConfig = Callable[..., dict[str, Any]]


def test_between_two_steps_the_last_one_is_saved(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that cannot be loaded in the second epoch; the run goes on as one left alone."""
    config = make_config("mochi", max_epochs=3, optimizer={"batch_size": 8}, log_every_n_steps=1)
    train(config, tmp_path / "whole")
    read, calls = ImageFiles.__getitem__, 0

    def fails(self: ImageFiles, index: int) -> Any:
        nonlocal calls
        calls += 1
        if calls > 80:
            raise ZeroDivisionError("of a transform")
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(ImageFiles, "__getitem__", fails)
        with pytest.raises(ZeroDivisionError) as raised:
            train(config, tmp_path / "parts")
    assert raised.value.__notes__ == [f"`solo-ext pretrain --resume {tmp_path / 'parts'}` goes on"]
    (saved,) = checkpoints(tmp_path / "parts")
    assert saved.step is not None
    assert saved.step > 6
    resume(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_in_the_first_step_nothing_is_left(make_config: MakeConfig, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no such thing")

    failing = LambdaCallback(on_before_optimizer_step=fail)
    with pytest.raises(UserError, match=r"the first step of training fails: ZeroDivisionError: no"):
        train(make_config("simclr"), tmp_path / "run", callbacks=[failing])
    assert not (tmp_path / "run").exists()


def test_another_environment_is_told(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    train_killed(make_config("simclr", max_epochs=2), run, 2)
    file = run / ENVIRONMENT
    before = json.loads(file.read_text()) | {"torch_threads": 7, "cores": 99}
    file.write_text(json.dumps(before))
    resume(run)
    assert "goes on in another environment (torch_threads: 7.0 -> " in caplog.text
    assert "cores" not in caplog.text
    # A finished run has nothing left to compute.
    file.write_text(json.dumps(before))
    caplog.clear()
    resume(run)
    assert caplog.text == ""


def test_a_run_directory_that_goes_while_it_trains(make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def move(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            run.rename(tmp_path / "moved")

    config = make_config("simclr", max_epochs=4, log_every_n_steps=1)
    with pytest.raises(UserError, match="is gone, or a file in it: it was moved"):
        train(config, run, callbacks=[LambdaCallback(on_train_batch_end=move)])
    resume(tmp_path / "moved")
