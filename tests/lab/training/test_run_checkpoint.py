"""When checkpoints are written, and what happens where they cannot be."""

from __future__ import annotations

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
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import checkpoints
from tests.lab.training.same_run import train, train_killed

MakeConfig = Callable[..., dict[str, Any]]


def names_over_time(config: dict[str, Any], run: Path) -> list[str]:
    """The newest checkpoint before each batch."""
    seen: list[str] = []

    def look(*_: Any) -> None:
        found = checkpoints(run)
        seen.append(found[-1].path.name.removeprefix("tiny-run-") if found else "")

    watch = LambdaCallback(on_train_batch_start=look)
    train(config, run, callbacks=[watch])
    return seen


def test_every_n_minutes(make_config: MakeConfig, tmp_path: Path) -> None:
    """Less than a step is after every one."""
    checkpoint = {"every_n_minutes": 1e-9, "frequency": 100}
    config = make_config("simclr", checkpoint=checkpoint, max_epochs=2)
    seen = names_over_time(config, tmp_path / "run")
    assert seen == ["", "ep=0-step=1.ckpt", "ep=0.ckpt", "ep=1-step=3.ckpt"]


def test_minutes_that_are_not_over(make_config: MakeConfig, tmp_path: Path) -> None:
    checkpoint = {"every_n_minutes": 60, "frequency": 100}
    config = make_config("simclr", checkpoint=checkpoint, max_epochs=3)
    seen = names_over_time(config, tmp_path / "run")
    assert seen == ["", "", *["ep=0.ckpt"] * 4]


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
