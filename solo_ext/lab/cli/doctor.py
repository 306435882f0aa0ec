"""``solo-ext doctor``: what is installed, what is missing, how to get it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement

from solo_ext import __version__
from solo_ext.core.errors import UserError
from solo_ext.data.dali import INSTALL
from solo_ext.host import load
from solo_ext.host.patches import PATCHES
from solo_ext.lab.training.run_dir import PACKAGES, package_version

_EXTRAS = {
    "faiss": ("faiss", "k-means by faiss"),
    "flash-kmeans": ("flash_kmeans", "k-means on CUDA"),
    "dali": ("nvidia.dali", "data.format: dali"),
    "h5": ("h5py", "data.format: h5"),
    "hf": ("datasets", "data.format: huggingface"),
    "streaming": ("pyarrow", "data.format: streaming or webdataset from S3 or GCS"),
    "metric": ("pytorch_metric_learning", "losses pml/<Class>"),
    "viz": ("umap", "eval map methods=[umap]"),
    "embed": ("pyarrow", "solo-ext embed"),
    "atlas": ("embedding_atlas", "solo-ext embed --atlas"),
    "report": ("altair", "the page of a run"),
    "benchmark": ("submitit", "benchmark run --launcher slurm"),
    "ray": ("ray", "benchmark run --launcher ray"),
    "tensorboard": ("tensorboard", "loggers: [tensorboard]"),
    "wandb": ("wandb", "wandb.enabled: true"),
}
"""Module of each extra, imported only if a setting asks for it, and what the extra is for."""
_GET = {"dali": INSTALL, "wandb": "pip install wandb"}


def diagnose() -> dict[str, Any]:
    """Examines the installation; a missing solo-learn is a finding and not an error.

    >>> found = diagnose()
    >>> list(found)[:3], found["extras"]["faiss"]["get"]
    (['solo_ext', 'python', 'packages'], "pip install 'solo-ext[faiss]'")
    """
    import torch

    try:
        requirements = requires("solo-ext") or []
    except PackageNotFoundError:
        # The package is used from a checkout that is not installed.
        requirements = []
    return {
        "solo_ext": __version__,
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "unmet": unmet(requirements),
        "host": _host(),
        "devices": {
            "cuda_build": torch.version.cuda,
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "extras": {
            name: {
                "installed": _importable(module),
                "for": purpose,
                "get": _GET.get(name, f"pip install 'solo-ext[{name}]'"),
            }
            for name, (module, purpose) in _EXTRAS.items()
        },
    }


def unmet(requirements: list[str]) -> list[str]:
    """Requirements that the installed versions do not meet, one line each.

    Several of the lowest versions are the first without a known defect
    (docs/guides/untrusted-files.md).

    >>> unmet(["pytest<1"])[0].partition(":")[2]
    " not pytest<1; pip install --upgrade 'pytest<1'"
    """
    found = []
    for wanted in map(Requirement, requirements):
        held = package_version(wanted.name)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if held is None or not wanted.specifier.contains(held, prereleases=True):
            asked = f"{wanted.name}{wanted.specifier}"
            state = held or "is missing"
            found.append(f"{wanted.name} {state}: not {asked}; pip install --upgrade '{asked}'")
    return found


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The findings as lines of text.

    >>> next(lines(diagnose())).split()[0]
    'solo_ext'
    """
    yield f"solo_ext     {found['solo_ext']}, Python {found['python']}"
    host = found["host"]
    if "error" in host:
        yield f"solo-learn   MISSING: {host['error']}"
    else:
        yield (
            f"solo-learn   {host['generation']} (calls itself {host['version']}, fingerprint "
            f"{host['fingerprint']}) in {host['path']}"
        )
        yield f"             patched: {', '.join(host['patches'])}"
    versions = (f"{k} {v or 'MISSING'}" for k, v in found["packages"].items())
    yield f"packages     {', '.join(versions)}"
    yield from (f"DANGER       {line}" for line in found["unmet"])
    devices = found["devices"]
    gpus = ", ".join(devices["gpus"]) or "none found; training runs on the CPU"
    yield f"GPU          {gpus}; torch built for CUDA {devices['cuda_build']}"
    for name, extra in found["extras"].items():
        state = "installed" if extra["installed"] else f"not installed: {extra['get']}"
        yield f"{name:<12} {state} ({extra['for']})"


def _host() -> dict[str, Any]:
    try:
        info = load().info
    except UserError as error:
        return {"error": str(error)}
    return {
        "generation": info.generation,
        "version": info.version,
        "fingerprint": info.fingerprint,
        "path": str(info.path),
        "patches": [p.name for p in PATCHES.values() if p.undo],
    }


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
