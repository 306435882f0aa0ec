"""Configs of the matrix, runs of several processes, and the record of cells."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import KWARGS
from tests.matrix.record import Outcome, note
from tests.matrix.rows import MAE, TAUGHT, VIT
from tests.scripts import run_script
from tests.training.resumable import MakeConfig, config_of

ConfigOf = Callable[..., dict[str, Any]]
Noted = Callable[[int], dict[str, list[dict[str, Any]]]]
BATCH = 24
FITTING: dict[str, dict[str, Any]] = {
    "dino": {"warmup_teacher_temperature_epochs": 1},
    "wmse": {"whitening_size": BATCH // 4, "whitening_eps": 0.5},
}
"""To one epoch, and to the batch of one of four processes."""
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
    """``noted(n)[method]``: what each of n processes held in the end, without batch norm."""
    rows = [item.callspec.params.get("method") for item in request.session.items if _is_cell(item)]
    methods, known = sorted({row for row in rows if row}), {}

    def run(processes: int) -> dict[str, list[dict[str, Any]]]:
        if processes in known:
            return known[processes]
        folder = tmp_path_factory.mktemp(f"processes-{processes}")
        configs = {m: _two_steps(matrix_config, m, processes) for m in methods}
        (folder / "configs.json").write_text(json.dumps(configs))
        run_script(Path(__file__).with_name("processes.py"), folder, timeout=1500)
        known[processes] = {
            m: [torch.load(folder / f"{m}-{rank}.pt") for rank in range(processes)] for m in methods
        }
        return known[processes]

    return run


def _is_cell(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item, "callspec")


def _two_steps(matrix_config: ConfigOf, method: str, processes: int) -> dict[str, Any]:
    kwargs = {**({} if method == "metric" else KWARGS.get(method, {})), **FITTING.get(method, {})}
    # The rows of a smaller queue depend on the order of the processes.
    if "queue_size" in kwargs:
        kwargs["queue_size"] = 3 * BATCH
    if "support_set" in kwargs:
        kwargs["support_set"] = {**kwargs["support_set"], "size": 3 * BATCH}
    config = matrix_config(
        method,
        method_kwargs=kwargs,
        augmentations=FIXED_CROPS[:1] if method == "mae" else FIXED_CROPS,
        optimizer={"batch_size": BATCH // processes, "lr": 0.5, "kwargs": {"momentum": 0.9}},
        scheduler={"name": "none"},
        backbone=VIT,
        devices=processes,
        checkpoint={"enabled": False},
        max_epochs=1,
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
