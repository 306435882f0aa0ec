"""Which implementation runs Lloyd's iterations."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from solo_ext.clustering.faiss_backend import faiss_lloyd
from solo_ext.clustering.flash_backend import flash_lloyd
from solo_ext.clustering.lloyd import lloyd
from solo_ext.clustering.rows import Rows
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.core.precision import Precision


class Backend(Protocol):
    """Moves means (K, D) for at most ``iterations`` steps; returns them and the steps done."""

    def __call__(
        self, rows: Rows, means: Tensor, iterations: int, precision: Precision, relocate: bool
    ) -> tuple[Tensor, int]: ...


BACKENDS: dict[str, Backend] = {"torch": lloyd, "faiss": faiss_lloyd, "flash": flash_lloyd}

# Package to import, and what to install for it.
_NEEDS = {
    "faiss": ("faiss", 'pip install "solo-ext[faiss]" (or "solo-ext[faiss-gpu]" for CUDA)'),
    "flash": ("flash_kmeans", 'pip install "solo-ext[flash-kmeans]"'),
}


def resolve_backend(
    name: str, device: torch.device | str, *, sharded: bool = False, in_file: bool = False
) -> str:
    """Name of the backend that will run.

    "auto" is "torch" on a CPU, where the row `e-step` of `benchmarks/speed` finds it the fastest
    and nothing need be installed for it; on CUDA "flash" where flash-kmeans is installed, else
    "torch". Over several ranks and for rows in a file it is "torch", the only one that shares the
    work and the only one that does not hold all rows.

    Args:
        name: "auto", "torch", "faiss" or "flash".
        device: Where the features are.
        sharded: Whether the rows are spread over several ranks.
        in_file: Whether the rows are in a file, because memory is too small for them.

    Returns:
        "torch", "faiss" or "flash".

    Raises:
        ConfigError: An unknown name, a package that is not installed, "flash" without CUDA, or
            another one than "torch" for rows in a file.
    """
    kind = torch.device(device).type
    if name == "auto":
        alone = not sharded and not in_file
        return "flash" if kind == "cuda" and alone and _installed("flash") else "torch"
    if name not in BACKENDS:
        allowed = nearest(name, ["auto", *BACKENDS])
        raise ConfigError("backend", name, "no such k-means backend", allowed)
    if name == "flash" and kind != "cuda":
        raise ConfigError(
            "backend", name, f"needs features on CUDA, these are on {kind}", "use auto or torch"
        )
    if in_file and name != "torch":
        raise ConfigError(
            "backend",
            name,
            "holds all rows in memory, and these are in a file",
            "take auto or torch, or cluster a sample of them",
        )
    if not _installed(name):
        package, remedy = _NEEDS[name]
        raise ConfigError("backend", name, f"the package {package} is not installed", remedy)
    return name


def _installed(name: str) -> bool:
    return name not in _NEEDS or importlib.util.find_spec(_NEEDS[name][0]) is not None
