"""Collapse is reported while it happens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LambdaCallback
from PIL import Image
from torch import Tensor

from solo_ext.lab.training.run_dir import METRICS
from solo_ext.lab.training.watch import COLLAPSED, METRIC
from tests.conftest import MakeConfig, json_lines
from tests.lab.training import same_run

Found = tuple[dict[int, float], list[str]]
Train = Callable[..., Found]


@pytest.fixture
def train(make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Train:
    """``train(method, *callbacks, ...)``: spread by step from 0, and what was reported."""

    def run(method: str, *callbacks: Callback, **changes: Any) -> Found:
        changes["optimizer"] = {"batch_size": 8, "lr": 0.05, **changes.get("optimizer", {})}
        config = make_config(method, **{"log_every_n_steps": 1, **changes})
        with caplog.at_level(logging.WARNING, "solo_ext"):
            same_run.train(config, tmp_path / "run", callbacks=callbacks)
        logged = json_lines(tmp_path / "run" / METRICS)
        reported = [r.getMessage() for r in caplog.records if "collapse" in r.getMessage()]
        return {r["step"]: r[METRIC] for r in logged if r.get(METRIC) is not None}, reported

    return run


@pytest.fixture
def alike(tmp_path: Path) -> str:
    """Class folders of images that are all the same."""
    for label in "012":
        (tmp_path / "alike" / label).mkdir(parents=True)
        for number in range(16):
            pixels = np.full((16, 16, 3), 90, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "alike" / label / f"{number}.png")
    return str(tmp_path / "alike")


@pytest.mark.fault
@pytest.mark.parametrize("method", ["pcl", "dino"])
def test_images_that_do_not_differ(method: str, train: Train, alike: str) -> None:
    """DINO has no projector: its features collapse."""
    values, reported = train(method, data={"train_path": alike})
    assert list(values) == list(range(6))
    assert all(value < 1e-3 for value in values.values())
    (line,) = reported
    assert line.startswith("collapse: embeddings are nearly constant (their spread is ")
    assert " of 1 at optimiser step 3)" in line


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("pcl", {}),
        ("dino", {}),
        ("simclr", {"accumulate_grad_batches": 2, "max_epochs": 2}),
    ],
)
def test_nothing_to_report(method: str, changes: dict[str, Any], train: Train) -> None:
    values, reported = train(method, log_every_n_steps=2, **changes)
    assert list(values) == [1, 3, 5]
    assert all(0.05 < value <= 1 for value in values.values())
    assert not reported


class _Attract(Callback):
    """Nothing but attraction, and of other images' views: nothing holds embeddings apart."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def step(batch: Any, batch_idx: int) -> Tensor:
            z1, z2 = (pl_module.projector(pl_module.backbone(x)) for x in batch[1])
            return 1 - F.cosine_similarity(z1, z2.roll(1, 0)).mean()

        pl_module.training_step = step


@pytest.mark.fault
def test_views_that_only_attract(train: Train) -> None:
    """From embeddings that spread to constant ones, by training."""
    values, reported = train("simclr", _Attract(), max_epochs=5, optimizer={"lr": 30.0})
    steps = sorted(values)
    assert values[steps[0]] > 5 * COLLAPSED > COLLAPSED > min(values.values())
    (line,) = reported
    found = int(line.partition("optimiser step ")[2].partition(")")[0]) - 1
    assert all(values[step] < COLLAPSED for step in range(found - 2, found + 1))


class _SameUntil(Callback):
    """Every image of a batch is the first one, in the first batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx < self.batches:
            for crop in batch[1]:
                crop[:] = crop[:1].clone()


@pytest.mark.fault
def test_two_looks_are_no_collapse(train: Train) -> None:
    _, reported = train("simclr", _SameUntil(2))
    assert not reported


def test_no_hook_is_left(train: Train) -> None:
    left: list[int] = []
    count = LambdaCallback(
        on_train_end=lambda _, method: left.append(len(method.projector._forward_hooks))
    )
    train("simclr", count)
    assert left == [0]
    assert torch.is_grad_enabled()
