"""Records of a run: metrics as JSON lines, and the environment."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from argparse import Namespace
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from solo_ext import __version__
from solo_ext.host import HostInfo
from solo_ext.json_lines import whole_lines
from solo_ext.paths import refuse_link

PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "torchmetrics",
    "timm",
    "hydra-core",
    "omegaconf",
    "numpy",
    "scikit-learn",
)


class JsonLines(Logger):
    """Appends every logged set of metrics as one line of JSON, at once.

    Args:
        file: the file.
        start_step: optimiser steps done where a run is resumed; lines of later ones are dropped,
            the run repeats them. Steps are counted from 0, as Lightning does.
    """

    def __init__(self, file: Path, start_step: int | None = None) -> None:
        super().__init__()
        self.file = refuse_link(file)
        self._drop_from(start_step)
        self._begin = time.monotonic()

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {k: _plain(v) for k, v in metrics.items()}
        line = {"step": step, "seconds": round(time.monotonic() - self._begin, 3), **values}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @rank_zero_only
    def complete(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs what a killed process may not have come to, unless the file has it."""
        for line in whole_lines(self.file):
            if line.get("step") == step and metrics.keys() <= line.keys():
                return
        self.log_metrics(metrics, step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kw: Any) -> None:
        """The config is a file of its own."""

    def _drop_from(self, step: int | None) -> None:
        if step is None or not self.file.is_file():
            return
        kept = [r for r in read_metrics(self.file) if (r.get("step") or 0) < max(step, 1)]
        scratch = self.file.with_suffix(".saving")
        scratch.unlink(missing_ok=True)
        scratch.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(scratch, self.file)


def _plain(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Lines of a ``metrics.jsonl``; one that a killed run left half written is passed over."""
    return whole_lines(file)


def package_version(name: str) -> str | None:
    """Version of an installed distribution, ``None`` where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(info: HostInfo) -> dict[str, Any]:
    """What a run ran on: host, versions, processor, accelerators."""
    return {
        "solo_ext": __version__,
        "host": {
            "generation": info.generation,
            "version": info.version,
            "fingerprint": info.fingerprint,
        },
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": _cores(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
