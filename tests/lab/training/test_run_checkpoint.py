"""When checkpoints are written, where they cannot be, and what is left after other errors."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.core.errors import UserError
from solo_ext.data.folders import ImageFiles
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import ENVIRONMENT, checkpoints
from tests.conftest import MakeConfig
from tests.lab.training.same_run import assert_same_run, train, train_killed


def names_over_time(config: dict[str, Any], run: Path) -> list[str]:
    """The newest checkpoint before each batch."""
    seen: list[str] = []

    def look(*_: Any) -> None:
        found = checkpoints(run)
        seen.append(found[-1].path.name.removeprefix("tiny-run-") if found else "")

    watch = LambdaCallback(on_train_batch_start=look)
    train(config, run, callbacks=[watch])
    return seen


@pytest.mark.parametrize(
    ("minutes", "names"),
    [
        (1e-9, ["", "ep=0-step=1.ckpt", "ep=0.ckpt", "ep=1-step=3.ckpt"]),
        (60, ["", "", "ep=0.ckpt", "ep=0.ckpt"]),
    ],
)
def test_every_n_minutes(
    minutes: float, names: list[str], make_config: MakeConfig, tmp_path: Path
) -> None:
    """Less than a step is after every one."""
    checkpoint = {"every_n_minutes": minutes, "frequency": 100}
    config = make_config("simclr", checkpoint=checkpoint, max_epochs=2)
    assert names_over_time(config, tmp_path / "run") == names


@pytest.mark.parametrize(("steps", "name"), [(3, "ep=1-step=3"), (4, "ep=1")])
def test_the_end_by_steps_is_saved(
    steps: int, name: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Whatever the frequency, and within an epoch or with it."""
    config = make_config("simclr", checkpoint={"frequency": 100}, max_steps=steps, max_epochs=10)
    result = train(config, tmp_path / "run")
    assert result.checkpoint is not None
    assert result.checkpoint.name == f"tiny-run-{name}.ckpt"
    assert result.epochs == resume(tmp_path / "run").epochs == 2
    begun: list[int] = []
    watch = LambdaCallback(
        on_train_batch_start=lambda trainer, *_: begun.append(trainer.global_step)
    )
    longer = prepare({**config, "max_steps": 6})
    pretrain(longer, run_dir=tmp_path / "run", callbacks=[watch], show_progress=False, force=True)
    assert begun == list(range(steps, 6))


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """From when it is called, no file of this process can grow beyond a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault
@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_disk_that_fills_up(
    make_config: MakeConfig, tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    """What was saved stays, nothing half-written does, and the run goes on once there is room."""
    run, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    config = make_config("simclr", checkpoint={"every_n_steps": 1}, max_epochs=2)

    def fill(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            full_disk()

    watch = LambdaCallback(on_train_batch_start=fill)
    with pytest.raises(UserError, match=r"a file cannot be written \(.*make room, then .* goes on"):
        train(config, run, callbacks=[watch])
    assert checkpoints(run)[-1].path.name == "tiny-run-ep=0.ckpt"
    assert not list(run.glob(".*.saving"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resume(run)
    assert checkpoints(run)[-1].epoch == 1


@pytest.mark.fault
def test_a_folder_that_cannot_be_made(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory; name one that can be written"):
        train(make_config("simclr"), tmp_path / "file" / "run")


@pytest.mark.fault
def test_one_process_at_a_time(make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = make_config("simclr", max_epochs=2, log_every_n_steps=1)
    log = run / "metrics.jsonl"

    def again(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            before = log.read_text()
            assert before
            with pytest.raises(UserError, match="is being written by another process"):
                train(config, run)
            assert log.read_text() == before

    watch = LambdaCallback(on_train_batch_start=again)
    result = train(config, run, callbacks=[watch])
    assert result.epochs == 2


@pytest.mark.fault
def test_another_process_that_ended_while_this_one_started(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Its last checkpoint is not passed over, and its log not cut."""
    run, config = tmp_path / "run", make_config("simclr", max_epochs=2)
    train_killed(config, run, 2)
    late, logs = prepare(config), list[bytes]()

    def meanwhile(cfg: Any) -> Any:
        resume(run)
        logs.append((run / "metrics.jsonl").read_bytes())
        return late.method(cfg)

    with pytest.raises(UserError, match="another process, which has ended by now, wrote a check"):
        pretrain(replace(late, method=meanwhile), run_dir=run, show_progress=False)
    assert checkpoints(run)[-1].epoch == 1
    assert logs == [(run / "metrics.jsonl").read_bytes()]


@pytest.mark.fault
def test_errors_that_are_not_of_the_file_are_told_as_they_are(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make room would not help against a device that has failed."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal"):
        train(make_config("simclr"), tmp_path / "run")


@pytest.mark.fault
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


@pytest.mark.fault
def test_in_the_first_step_nothing_is_left(make_config: MakeConfig, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no such thing")

    failing = LambdaCallback(on_before_optimizer_step=fail)
    with pytest.raises(UserError, match=r"the first step of training fails: ZeroDivisionError: no"):
        train(make_config("simclr"), tmp_path / "run", callbacks=[failing])
    assert not (tmp_path / "run").exists()


@pytest.mark.fault
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


@pytest.mark.fault
def test_a_run_directory_that_goes_while_it_trains(make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def move(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            run.rename(tmp_path / "moved")

    config = make_config("simclr", max_epochs=4, log_every_n_steps=1)
    with pytest.raises(UserError, match="is gone, or a file in it: it was moved"):
        train(config, run, callbacks=[LambdaCallback(on_train_batch_end=move)])
    (before,) = checkpoints(tmp_path / "moved")
    resume(tmp_path / "moved")
    (last,) = checkpoints(tmp_path / "moved")
    assert last.epoch == 3
    assert not before.path.exists()
