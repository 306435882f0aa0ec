"""Configs of the matrix, runs of several processes, and the record of cells."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext import host
from tests.conftest import KWARGS
from tests.matrix.record import Outcome, note
from tests.matrix.rows import IN_TURN, MAE, TAUGHT, VIT
from tests.scripts import run_script
from tests.training.resumable import MakeConfig, config_of

ConfigOf = Callable[..., dict[str, Any]]
Noted = Callable[..., dict[str, list[dict[str, Any]]]]
BATCH = 24
FITTING: dict[str, dict[str, Any]] = {
    "dino": {"warmup_teacher_temperature_epochs": 1, "freeze_last_layer": 0},
    "protocpc": {"freeze_prototypes_epochs": 0},
    "wmse": {"whitening_eps": 0.5},
}
"""To one epoch that trains all, and to small batches."""
LR = {"dino": 0.005, "metric": 0.05, "vibcreg": 0.002}
"""Where 0.5 is too much."""
EPOCHS = {"deepclusterv2": 2}
"""In its first it has nothing to learn from."""
FIXED_CROPS = [
    {"rrc": {"enabled": False}, "crop_size": 16, "num_crops": 1},
    {"rrc": {"enabled": False}, "solarization": {"prob": 1.0}, "crop_size": 16, "num_crops": 1},
]


@pytest.fixture(scope="session")
def matrix_config(make_config: MakeConfig, make_distilled: MakeConfig) -> ConfigOf:
    """``matrix_config(method, section={...}, ...)``: three epochs of six steps, on the CPU."""

    def make(method: str, **changes: Any) -> dict[str, Any]:
        of = make_distilled if method in TAUGHT else make_config
        if method != "mae":
            return config_of(of, method, **changes)
        changes.pop("backbone", None)
        config = config_of(of, method, **{"augmentations": MAE["augmentations"], **changes})
        return config | {key: MAE[key] for key in ("backbone", "method_kwargs")}

    return make


@pytest.fixture(scope="session")
def noted(
    matrix_config: ConfigOf,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Noted:
    """``noted(n)[method]``: what each of n processes held in the end, without batch norm.

    With ``parts=p`` a step's gradient is the mean over the batches of p processes in turn.
    """
    cells = [item.callspec.params for item in request.session.items if _is_cell(item)]
    methods = sorted({c["method"] for c in cells if "processes" in c["check"]})
    known: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {}

    def run(processes: int, parts: int = 1) -> dict[str, list[dict[str, Any]]]:
        key = processes, parts
        if key in known:
            return known[key]
        folder = tmp_path_factory.mktemp(f"processes-{processes}-{parts}")
        in_turn = IN_TURN[host.load().info.generation]
        chosen = methods if parts == 1 else [m for m in methods if m in in_turn]
        configs = {m: _two_steps(matrix_config, m, processes, parts) for m in chosen}
        (folder / "configs.json").write_text(json.dumps(configs))
        run_script(Path(__file__).with_name("processes.py"), folder, timeout=1500)
        known[key] = {
            m: [torch.load(folder / f"{m}-{rank}.pt") for rank in range(processes)] for m in chosen
        }
        return known[key]

    return run


def _is_cell(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == "test_cell"


def _two_steps(matrix_config: ConfigOf, method: str, processes: int, parts: int) -> dict[str, Any]:
    batch = BATCH // processes // parts
    kwargs = {**({} if method == "metric" else KWARGS.get(method, {})), **FITTING.get(method, {})}
    if method == "wmse":
        kwargs["whitening_size"] = batch
    # The rows of a smaller queue depend on the order of the processes.
    if "queue_size" in kwargs:
        kwargs["queue_size"] = 3 * BATCH
    if "support_set" in kwargs:
        kwargs["support_set"] = {**kwargs["support_set"], "size": 3 * BATCH}
    config = matrix_config(
        method,
        method_kwargs=kwargs,
        augmentations=FIXED_CROPS[:1] if method == "mae" else FIXED_CROPS,
        optimizer={"batch_size": batch, "lr": LR.get(method, 0.5), "kwargs": {"momentum": 0.9}},
        scheduler={"name": "none"},
        backbone=VIT,
        devices=processes,
        checkpoint={"enabled": False},
        max_epochs=EPOCHS.get(method, 1),
        accumulate_grad_batches=parts,
    )
    return config | ({"strategy": "ddp"} if processes > 1 else {})


@pytest.fixture
def came_to(request: pytest.FixtureRequest) -> Iterator[Callable[[Outcome], None]]:
    """``came_to(outcome)``: the record of this cell, written where the matrix alone is run."""
    begin, found = time.monotonic(), [Outcome("failed", "its test shows how")]
    yield found.append
    if request.config.option.markexpr == "matrix":
        assert isinstance(request.node, pytest.Function)
        cell = request.node.callspec.params
        note(cell["method"], cell["check"], found[-1], time.monotonic() - begin)
