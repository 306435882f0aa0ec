"""What a step logs is added to Lightning's means at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector import result

from solo_ext.lab.training.lightning_internals import StepLog
from solo_ext.lab.training.run_dir import METRICS
from tests.conftest import MakeConfig, json_lines
from tests.lab.training.same_run import train


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    lines = json_lines(run_dir / METRICS)
    return [
        {k: v for k, v in line.items() if k != "seconds" and "seconds" not in k} for line in lines
    ]


@pytest.mark.parametrize(("method", "accumulate"), [("pcl", 1), ("byol", 2)])
def test_numbers_are_lightnings(
    method: str,
    accumulate: int,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values of steps and means over epochs, with batches whose size is no power of two."""
    # A momentum classifier's loss is added to the logged one in place.
    more = {"momentum": {"classifier": True}} if method == "byol" else {}
    config = make_config(
        method,
        **more,
        optimizer={"batch_size": 7},
        max_epochs=3,
        log_every_n_steps=2,
        accumulate_grad_batches=accumulate,
    )
    train(config, tmp_path / "at once")
    own = numbers(tmp_path / "at once")
    monkeypatch.setattr(StepLog, "on_train_start", lambda *_: None)
    train(config, tmp_path / "one by one")
    assert own == numbers(tmp_path / "one by one")
    assert {"train_class_loss_step", "train_class_loss_epoch"} <= {k for line in own for k in line}


class Logs(Callback):
    """Has a method log a tensor of its own, and adds 1 to it at once or before the optimiser."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def on_train_start(self, trainer: pl.Trainer, method: Any) -> None:
        method.scale = torch.zeros(1)
        step = method.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            loss = step(batch, batch_idx)
            method.log("train_scale", method.scale, on_step=True, on_epoch=True)
            if self.at_once:
                method.scale.add_(1)
            return loss

        method.training_step = training_step

    def on_before_optimizer_step(self, trainer: Any, method: Any, optimizer: Any) -> None:
        if not self.at_once:
            method.scale.add_(1)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_value_is_that_of_its_log(make_config: MakeConfig, tmp_path: Path, at_once: bool) -> None:
    """Whatever changes it in place: the optimiser a parameter, solo-learn's step a loss."""
    config = make_config("simclr", optimizer={"batch_size": 8}, max_epochs=1, log_every_n_steps=1)
    train(config, tmp_path / "run", callbacks=[Logs(at_once)])
    lines = json_lines(tmp_path / "run" / METRICS)
    steps = [line["train_scale_step"] for line in lines if "train_scale_step" in line]
    assert steps == [0, 1, 2, 3, 4, 5]
    assert [line["train_scale_epoch"] for line in lines if "train_scale_epoch" in line] == [2.5]


def test_lightning_adds_only_the_first_batch(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []
    update = result._ResultMetric.forward

    def counted(metric: Any, *given: Any) -> None:
        added.append(metric.meta.name)
        update(metric, *given)

    monkeypatch.setattr(result._ResultMetric, "forward", counted)
    train(make_config("simclr", optimizer={"batch_size": 8}, max_epochs=2), tmp_path / "run")
    assert added.count("train_class_loss") == 2
    assert added.count("train_acc1") == 2
