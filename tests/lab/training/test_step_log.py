"""What a step logs is added to Lightning's means at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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


@pytest.mark.parametrize("method", ["simclr", "pcl"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers_are_lightnings(
    method: str,
    accumulate: int,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values of steps and means over epochs, with batches whose size is no power of two."""
    config = make_config(
        method,
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
