"""Stopped and resumed is the same as never stopped, to the last bit."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from solo_ext.config.schema import Images
from solo_ext.core.errors import StoppedBySignal
from solo_ext.data.convert import convert
from solo_ext.data.images import open_images
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import METRICS, PREVIOUS, checkpoints, read_config
from solo_ext.memory.heads import ClassWeights
from tests.conftest import MakeConfig
from tests.data.making import write_tars
from tests.lab.training.resumable import METHODS, STEPS, config_of
from tests.lab.training.same_run import (
    assert_resumes,
    assert_same_run,
    logged,
    train,
    train_killed,
    whole_run,
)

BUILTINS = (
    "simclr",
    "mocov2plus",
    "nnclr",
    "byol",
    "swav",
    "deepclusterv2",
    "simsiam",
    "dino",
    "wmse",
)
EVERY = (*BUILTINS, "hard_negative", *METHODS)
PLAIN = ("mocov2plus", "nnclr", "simclr", "simsiam")
"""Built-ins whose resumption no patch changes; the matrix kills and resumes them, too."""
TWICE_IN_AN_EPOCH = ("debiased", "metric", "pcl", "wmse")
"""A plain one, two kinds of clusters, and one that draws in each step."""


# Every test run takes along one that draws in each step, and PCL's cells of the matrix.
@pytest.mark.parametrize(
    "method",
    [
        m
        if m == "wmse"
        else pytest.param(m, marks=pytest.mark.matrix if m in PLAIN else pytest.mark.slow)
        for m in EVERY
    ],
)
def test_resumed_equals_uninterrupted(
    method: str, make_config: MakeConfig, make_distilled: MakeConfig, tmp_path: Path
) -> None:
    """Resumed between two epochs, then within one, and some once more within the same."""
    distilled = method.partition("-")[0] in ("seed", "protoseed")
    config = config_of(make_distilled if distilled else make_config, method)
    again = (STEPS + 4,) if method in TWICE_IN_AN_EPOCH else ()
    assert_resumes(config, tmp_path, STEPS, STEPS + 2, *again)


@pytest.mark.parametrize(("step", "limit_val_batches"), [(STEPS, 0), (2 * STEPS, 1.0)])
def test_a_run_of_steps(
    step: int, limit_val_batches: float, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Lightning alone would train the next epoch's first batch as one more of the last epoch."""
    settings = {"max_steps": 3 * STEPS, "max_epochs": 9, "limit_val_batches": limit_val_batches}
    assert_resumes(config_of(make_config, "simclr", **settings), tmp_path, step)


def test_epochs_of_a_part_of_the_batches(make_config: MakeConfig, tmp_path: Path) -> None:
    """The means that an epoch logs are of its own batches."""
    config = config_of(make_config, "simclr", limit_train_batches=STEPS - 1)
    assert_resumes(config, tmp_path, STEPS - 1, STEPS + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "in_memory"), [(STEPS + 2, False), (STEPS, True), (STEPS + 2, "device")]
)
def test_augmentation_on_the_batch(
    step: int, in_memory: bool | str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Multi-crop, and views that are mixed."""
    mix = {"name": "cutmix", "min_share": 0.6}
    data = {"augmentation": "batch", "in_memory": in_memory, "mix": mix}
    jitter = {"prob": 0.8, "brightness": 0.4, "saturation": 0.2, "hue": 0.1}
    large = {"crop_size": 16, "num_crops": 2, "color_jitter": jitter}
    crops = [large, {"crop_size": 8, "num_crops": 2, "gaussian_blur": {"prob": 0.5}}]
    config = config_of(make_config, "protocpc", data=data, augmentations=crops)
    assert_resumes(config, tmp_path, step)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("streaming", "pcl"),
        ("webdataset", "pcl"),
        pytest.param("streaming", "nnclr_symmetric", marks=pytest.mark.slow),
        pytest.param("webdataset", "pcl-bank", marks=pytest.mark.slow),
    ],
)
def test_from_shards(
    kind: str,
    method: str,
    images: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Methods that need the number of a sample: E-steps, a bank, a support set without oneself."""
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    folders = open_images(Images(dataset="custom", train_path=str(images)), "train")
    if kind == "streaming":
        convert(folders, tmp_path / "shards", 6000)
    else:
        write_tars(tmp_path / "shards", folders, 5)
    assert len(list((tmp_path / "shards").glob("*.*"))) > 6
    data = {
        "train_path": str(tmp_path / "shards"),
        "format": kind,
        "streaming": {"shuffle_shards": 2},
    }
    assert_resumes(config_of(make_config, method, data=data), tmp_path, STEPS + 2)


def test_clusters_are_rematched_as_before(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class weights and their momentum move with the clusters, in a resumed run too."""
    moves: list[tuple[list[int], list[int]]] = []
    rematch = ClassWeights.rematch_

    def note(self: ClassWeights, old: torch.Tensor, new: torch.Tensor, state: Any) -> None:
        moves.append((old.tolist(), new.tolist()))
        assert state["momentum_buffer"].shape == self.weight.shape
        rematch(self, old, new, state)

    monkeypatch.setattr(ClassWeights, "rematch_", note)
    config = config_of(make_config, "metric")
    train(config, tmp_path / "whole")
    assert len(moves) == 2
    assert any(old != new for old, new in moves)
    train_killed(config, tmp_path / "parts", 2 * STEPS)
    resume(tmp_path / "parts")
    # Killed within the third epoch, whose checkpoint is of before its clusters.
    assert moves[2:] == [*moves[:2], moves[1]]
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("method", ["pcl", pytest.param("metric", marks=pytest.mark.slow)])
def test_features_of_e_steps_may_lie_on_a_disk(
    method: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Of every E-step, cold and warm, or from the resumption on."""
    whole = config_of(make_config, method)
    parts = copy.deepcopy(whole)
    kwargs = parts["method_kwargs"]
    kwargs.get("clusters", kwargs)["features_dir"] = str(tmp_path / "disk")
    assert_resumes(whole, tmp_path, STEPS + 2, parts=parts)
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.slow
def test_number_of_workers_may_change(make_config: MakeConfig, tmp_path: Path) -> None:
    first, second = (config_of(make_config, "debiased", data={"num_workers": n}) for n in (0, 2))
    assert_resumes(first, tmp_path, STEPS + 3, parts=second)


def test_accumulated_gradients(make_config: MakeConfig, tmp_path: Path) -> None:
    """Momentum networks move with the optimiser; checkpoints fall on its steps only."""
    config = config_of(make_config, "byol", accumulate_grad_batches=2)
    assert_resumes(config, tmp_path, STEPS + 3)


def test_metrics_are_not_repeated(make_config: MakeConfig, tmp_path: Path) -> None:
    """Lines past the checkpoint are dropped before the resumed run writes them again."""
    config = config_of(
        make_config, "debiased", checkpoint={"every_n_steps": 4}, log_every_n_steps=1
    )
    assert_resumes(config, tmp_path, STEPS + 4)
    steps = [line for line in logged(tmp_path / "parts") if "train_class_loss_step" in line]
    assert [line["step"] for line in steps] == list(range(3 * STEPS))


def test_a_finished_run_is_left_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    config = config_of(make_config, "debiased", max_epochs=1)
    first = train(config, tmp_path / "run")
    assert first.checkpoint is not None
    before = first.checkpoint.read_bytes()
    again = resume(tmp_path / "run")
    assert again.checkpoint == first.checkpoint
    assert again.checkpoint is not None
    assert again.checkpoint.read_bytes() == before
    assert again.images_per_second == 0


@pytest.mark.fault
def test_a_finished_run_gets_the_line_that_a_kill_took(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Of the last epoch, which Lightning logs after the last checkpoint."""
    config = config_of(make_config, "debiased", max_epochs=1)
    train(config, tmp_path / "run")
    whole = logged(tmp_path / "run")
    file = tmp_path / "run" / METRICS
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    for _ in range(2):
        resume(tmp_path / "run")
        assert logged(tmp_path / "run") == whole


@pytest.mark.fault
def test_a_run_killed_before_its_earlier_checkpoint_went_keeps_one(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = config_of(make_config, "debiased", max_epochs=1)
    last = train(config, tmp_path / "run").checkpoint
    assert last is not None
    earlier = last.with_name(f"{last.stem}-step={STEPS - 1}.ckpt")
    earlier.write_bytes(last.read_bytes())
    resume(tmp_path / "run")
    assert checkpoints(tmp_path / "run")[0].path == last
    assert {file.name for file in last.parent.glob("*.ckpt*")} == {
        last.name,
        f"{earlier.name}{PREVIOUS}",
    }


def test_auto_resume_finds_the_run_of_the_config(make_config: MakeConfig, tmp_path: Path) -> None:
    folders = {"checkpoint": {"dir": str(tmp_path)}, "auto_resume": {"enabled": True}}
    config = config_of(make_config, "debiased", **folders)
    train_killed(config, None, STEPS + 2)
    (stopped,) = (tmp_path / "debiased").iterdir()
    done = train(config, None)
    assert (done.run_dir, done.epochs) == (stopped, 3)
    fresh = train({**config, "auto_resume": {"enabled": False}, "max_epochs": 3}, None)
    assert fresh.run_dir != stopped


def test_config_of_the_run_is_complete(make_config: MakeConfig, tmp_path: Path) -> None:
    """What is stored composes to the same run: rates unscaled, defaults written out."""
    config = config_of(make_config, "debiased", max_epochs=1)
    prepared = prepare(config)
    pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    again = prepare(read_config(tmp_path / "run"))
    assert again.run == prepared.run
    assert again.cfg == prepared.cfg
    assert again.cfg.optimizer.lr == pytest.approx(0.05 * 8 / 256)


BATCH = STEPS + 4
"""So many batches are done when the second epoch's second validation is due."""


def kill() -> None:
    raise RuntimeError("killed")


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("stop", "hook", "batch", "validated", "accumulated"),
    [
        (kill, "on_validation_start", BATCH - 1, False, 2),
        (kill, "on_train_batch_start", BATCH, True, 1),
        (send, "on_train_batch_start", BATCH - 1, True, 2),
        (send, "on_validation_start", BATCH - 1, True, 1),
    ],
    ids=["killed-within", "killed-after", "signal-before", "signal-within"],
)
def test_the_log_is_that_of_the_whole_run(
    stop: Callable[[], None],
    hook: str,
    batch: int,
    validated: bool,
    accumulated: int,
    make_config: MakeConfig,
    images: Path,
    tmp_path: Path,
) -> None:
    """Whether it is stopped before, within or after a validation."""

    def act(trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == batch:
            stop()

    config = config_of(
        make_config,
        "debiased",
        data={"val_path": str(images)},
        val_check_interval=2,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulated,
    )
    whole = whole_run(config)
    assert sum("val_acc1" in line for line in logged(whole)) == 3 * STEPS // 2
    parts = tmp_path / "parts"
    with pytest.raises((RuntimeError, StoppedBySignal), match=r"killed|SIGTERM"):
        train(config, parts, callbacks=[LambdaCallback(**{hook: act})])
    # One is written after its validation, where one is due.
    batches = BATCH if validated else BATCH - accumulated
    assert checkpoints(parts)[-1].step == batches // accumulated
    resume(parts)
    assert_same_run(whole, parts)
