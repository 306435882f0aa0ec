"""Runs, killed and resumed ones among them, and whether two ended alike, to the last bit."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import PretrainResult, pretrain, resume
from solo_ext.lab.training.run_dir import METRICS, checkpoints
from tests.lab.training.resumable import KillAt


def train(config: dict[str, Any], run_dir: Path | None, **options: Any) -> PretrainResult:
    return pretrain(prepare(config), run_dir=run_dir, show_progress=False, **options)


def command_of(config: dict[str, Any], folder: Path, run_dir: Path | str) -> list[str]:
    """The words after ``solo-ext`` that train this config, which is written to the folder."""
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    return ["pretrain", f"--config-path={folder}", "--config-name=mine", f"--run-dir={run_dir}"]


def train_killed(config: dict[str, Any], run_dir: Path | None, step: int) -> None:
    """Trains until a batch that is not begun."""
    with pytest.raises(RuntimeError, match="killed"):
        train(config, run_dir, callbacks=[KillAt(step)])


def whole_run(config: dict[str, Any]) -> Path:
    """The directory of a run that was left alone, which others read too: it must stay as it is.

    It writes no checkpoints within epochs, whether the config asks for them or not: to write them
    changes nothing.
    """
    held = {k: v for k, v in config.get("checkpoint", {}).items() if k != "every_n_steps"}
    return _whole_run(json.dumps({**config, "checkpoint": held}, sort_keys=True))


@functools.cache
def _whole_run(config: str) -> Path:
    """Several tests compare with a run of one config, which is trained once in a process."""
    _folders.append(tempfile.TemporaryDirectory(prefix="whole-"))
    return train(json.loads(config), Path(_folders[-1].name) / "run").run_dir


_folders: list[tempfile.TemporaryDirectory[str]] = []
"""They go when this process ends."""


def assert_resumes(
    config: dict[str, Any], folder: Path, *kills: int, parts: dict[str, Any] | None = None
) -> None:
    """Killed before these batches and resumed, a run ends as one that was left alone.

    Args:
        config: of both runs.
        folder: in which the one that is killed has its directory, ``parts``.
        kills: batches of the whole run, from 0.
        parts: another config of the one that is killed.
    """
    first, *later = kills
    train_killed(parts or config, folder / "parts", first)
    for step in later:
        with pytest.raises(RuntimeError, match="killed"):
            resume(folder / "parts", callbacks=[KillAt(step)])
    resume(folder / "parts")
    assert_same_run(whole_run(config), folder / "parts")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Those of the most advanced checkpoint, buffers included."""
    state = torch.load(checkpoints(run_dir)[-1].path, weights_only=True)["state_dict"]
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}


def same_weights(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def final(run_dir: Path) -> dict[str, Any]:
    """The one checkpoint that is left."""
    found = checkpoints(run_dir)
    assert len(found) == 1, f"one checkpoint must be left, there are {found}"
    state: dict[str, Any] = torch.load(found[0].path, weights_only=True)
    return state


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Recursively equal, floats and tensors to the last bit; times are none."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a.isnan(), b.isnan()), path
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if _is_time(key):
                continue
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}.{i}")
    else:
        assert a == b, path


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, buffers, optimiser, schedules, random generators, the place in the data, the log."""
    one, two = final(a), final(b)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(one[part], two[part], part)
    for part in ("data", "processes", "unlogged"):
        assert_same(one["solo_ext"][part], two["solo_ext"][part], part)
    assert_same(logged(a), logged(b), METRICS)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """All metrics, means over resumed epochs among them; times are none."""
    lines = (run_dir / METRICS).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not _is_time(k)} for line in lines]


def _is_time(name: Any) -> bool:
    return isinstance(name, str) and "seconds" in name
