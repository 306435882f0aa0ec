"""Records of a run: metrics as JSON lines, and the environment."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from solo_ext import __version__
from solo_ext.core.files import read_jsonl, refuse_link, write_text, writing
from solo_ext.host import HostInfo

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
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = refuse_link(file)
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
        with writing(self.file), self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @rank_zero_only
    def go_on(self, step: int, unlogged: Mapping[str, Any] | None) -> None:
        """Makes the file that of a run which stood at a checkpoint and was stopped there.

        No other process may be at work in the folder.

        Args:
            step: optimiser steps done there; lines of later ones are dropped, the run repeats
                them. Steps are counted from 0, as Lightning does.
            unlogged: of :func:`solo_ext.lab.training.run_state.unlogged`: what a killed process may
                not have come to log; added where it is missing.
        """
        kept: list[dict[str, Any]] = []
        if self.file.is_file():
            kept = [line for line in read_metrics(self.file) if (line.get("step") or 0) < step]
            write_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        if unlogged is None:
            return
        metrics, last = unlogged["metrics"], unlogged["step"]
        if not any(k["step"] == last and metrics.keys() <= k.keys() for k in kept):
            self.log_metrics(metrics, last)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kw: Any) -> None:
        """The config is a file of its own."""


def _plain(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Lines of a ``metrics.jsonl``; one that a killed run left half written is passed over."""
    return read_jsonl(file)


def package_version(name: str) -> str | None:
    """Version of an installed distribution, ``None`` where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(info: HostInfo, patches: Sequence[str] = ()) -> dict[str, Any]:
    """What a run ran on: host, versions, processor, accelerators.

    Args:
        info: the host.
        patches: those that change numbers of the host's, as far as they were applied.
    """
    return {
        "solo_ext": __version__,
        "host": {
            "generation": info.generation,
            "version": info.version,
            "fingerprint": info.fingerprint,
            "patches": list(patches),
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
