"""Runs of two steps, of several processes or of one on the joined batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.conftest import DISTILLATION, KWARGS
from tests.lab.training.resumable import MakeConfig, config_of
from tests.matrix.rows import MAE, VIT
from tests.scripts import run_script

ConfigOf = Callable[..., dict[str, Any]]
BATCH = 24
QUEUE = 3 * BATCH
"""More rows than two steps write: which rows a smaller one still holds is up to their order."""
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


def config_maker(make_config: MakeConfig, make_distilled: MakeConfig) -> ConfigOf:
    """``make(method, section={...}, ...)``: three epochs of six steps, on the CPU."""

    def make(method: str, **changes: Any) -> dict[str, Any]:
        of = make_distilled if method in DISTILLATION else make_config
        if method != "mae":
            return config_of(of, method, **changes)
        changes.pop("backbone", None)
        config = config_of(of, method, **{"augmentations": MAE["augmentations"], **changes})
        return config | {key: MAE[key] for key in ("backbone", "method_kwargs")}

    return make


def two_steps(
    make: ConfigOf, method: str, processes: int, batch: int, **changes: Any
) -> dict[str, Any]:
    """A config without batch norm and random crops, of so many images to a process and batch."""
    kwargs = {} if method == "metric" else KWARGS.get(method, {})
    kwargs = {**kwargs, **FITTING.get(method, {}), **changes.pop("method_kwargs", {})}
    changes.setdefault("augmentations", FIXED_CROPS[:1] if method == "mae" else FIXED_CROPS)
    if method == "wmse":
        kwargs["whitening_size"] = batch
    if "queue_size" in kwargs:
        kwargs["queue_size"] = QUEUE
    if "support_set" in kwargs:
        kwargs["support_set"] = {**kwargs["support_set"], "size": QUEUE}
    config = make(
        method,
        method_kwargs=kwargs,
        optimizer={"batch_size": batch, "lr": LR.get(method, 0.5), "kwargs": {"momentum": 0.9}},
        scheduler={"name": "none"},
        backbone=VIT,
        devices=processes,
        checkpoint={"enabled": False},
        max_epochs=EPOCHS.get(method, 1),
        **changes,
    )
    return config | ({"strategy": "ddp"} if processes > 1 else {})


def run_together(
    folder: Path, configs: Mapping[str, dict[str, Any]], processes: int, *words: str
) -> dict[str, list[dict[str, Any]]]:
    """What each process held in the end, by the name of the config; see ``processes.py``."""
    (folder / "configs.json").write_text(json.dumps(configs))
    run_script(Path(__file__).with_name("processes.py"), folder, *words, timeout=1500)
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(processes)]
        for name in configs
    }
