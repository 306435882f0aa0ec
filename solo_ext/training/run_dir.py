"""Run directories: what they hold, under the names that upstream's scripts read."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solo_ext.config.yaml_text import read_yaml
from solo_ext.errors import UserError
from solo_ext.paths import write_text as write_text

CONFIG, ARGS = "config.yaml", "args.json"
METRICS, ENVIRONMENT, TIMING = "metrics.jsonl", "environment.json", "timing.json"
_CHECKPOINT = re.compile(r"-ep=(?P<epoch>\d+)(?:-step=(?P<step>\d+))?\.ckpt$")
_NOT_OF_THE_RUN = {
    "resume_from_checkpoint",
    "auto_resume",
    "wandb",
    "loggers",
    "checkpoint",
    "debug_augmentations",
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file.

    Attributes:
        path: the file.
        epoch: epoch it was written in, from 0.
        step: optimiser step within a run for one written within an epoch, ``None`` at its end.
    """

    path: Path
    epoch: int
    step: int | None


def run_digest(given: Mapping[str, Any]) -> str:
    """Eight hex digits that change with everything that changes the run's numbers."""
    relevant = _numbers_alike({k: v for k, v in given.items() if k not in _NOT_OF_THE_RUN})
    text = json.dumps(relevant, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _numbers_alike(value: Any) -> Any:
    """10 and 10.0 are one setting; which of them a file holds depends on who wrote it."""
    if isinstance(value, dict):
        return {k: _numbers_alike(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_alike(v) for v in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def choose_run_dir(given: Mapping[str, Any]) -> Path:
    """``<checkpoint.dir>/<method>/<name>-<digest>``; numbered on where that is taken.

    With ``auto_resume.enabled`` the latest directory of the config is taken again, unless its
    last checkpoint is older than ``auto_resume.max_hours``.

    Args:
        given: the checked config.
    """
    parent = Path(given["checkpoint"]["dir"]) / given["method"]
    stem = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', given['name'])}-{run_digest(given)}"
    path: Path = parent / stem
    number = 1
    latest = path
    while path.exists():
        number += 1
        latest, path = path, parent / f"{stem}-{number}"
    automatic = given["auto_resume"]
    found = checkpoints(latest) if automatic["enabled"] and latest.exists() else []
    if found and time.time() - found[-1].path.stat().st_mtime < 3600 * automatic["max_hours"]:
        return latest
    return path


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Checkpoints of a run directory, the most advanced last."""
    found = []
    for path in run_dir.glob("*.ckpt"):
        match = _CHECKPOINT.search(path.name)
        if match:
            step = match["step"]
            found.append(Checkpoint(path, int(match["epoch"]), int(step) if step else None))
    # Within an epoch its end comes last.
    return sorted(found, key=lambda c: (c.epoch, c.step is None, c.step or 0))


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config that a run of ours was started with.

    Raises:
        UserError: the folder is no run directory of ``solo-ext pretrain``.
    """
    if not run_dir.is_dir():
        raise UserError(f"run directory {str(run_dir)!r}: no such folder")
    file = run_dir / CONFIG
    if not file.is_file():
        raise UserError(
            f"run directory {str(run_dir)!r}: no {CONFIG} in it; give a folder that "
            "`solo-ext pretrain` wrote"
        )
    try:
        loaded = read_yaml(file)
    except UserError:
        loaded = None
    if not isinstance(loaded, dict):
        raise UserError(f"{file}: not a config; the file was changed or cut short")
    return loaded
