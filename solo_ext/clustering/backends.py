"""The implementations of Lloyd's iterations, and which one runs: torch, faiss or flash-kmeans."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from solo_ext.clustering.lloyd import lloyd
from solo_ext.clustering.rows import Rows
from solo_ext.core.distributed import on_first
from solo_ext.core.errors import ConfigError, nearest
from solo_ext.core.precision import Precision


class Backend(Protocol):
    """Updates means (K, D) for at most ``iterations`` steps; returns them and the steps done."""

    def __call__(
        self, rows: Rows, means: Tensor, iterations: int, precision: Precision, relocate: bool
    ) -> tuple[Tensor, int]: ...


# Package to import, and how to install it.
_NEEDS = {
    "faiss": ("faiss", 'pip install "solo-ext[faiss]" (or "solo-ext[faiss-gpu]" for CUDA)'),
    "flash": ("flash_kmeans", 'pip install "solo-ext[flash-kmeans]"'),
}


def resolve_backend(
    name: str, device: torch.device | str, *, sharded: bool = False, in_file: bool = False
) -> str:
    """Name of the backend that will run.

    "auto" is "torch" on a CPU, where the row `e-step` of `benchmarks/speed` finds it the fastest
    and it needs no further package; on CUDA "flash" if flash-kmeans is installed, else "torch".
    Over several ranks and for rows in a file it is always "torch": only torch shares the work, and
    only torch does not hold all rows in memory.

    Args:
        name: "auto", "torch", "faiss" or "flash".
        device: Where the features are.
        sharded: Whether the rows are spread over several ranks.
        in_file: Whether the rows are in a file, because memory is too small for them.

    Returns:
        "torch", "faiss" or "flash".

    Raises:
        ConfigError: An unknown name, a package that is not installed, "flash" without CUDA, or
            rows in a file with a backend other than "torch".

    Example:
        >>> resolve_backend("auto", "cpu")
        'torch'
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


def faiss_lloyd(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
) -> tuple[Tensor, int]:
    """Runs ``faiss.Kmeans`` on all rows, without subsampling.

    faiss computes in fp32 and holds a copy of the rows. ``precision`` and ``relocate`` have no
    effect. A faiss with GPU support clusters features on CUDA there.

    Source:
        Douze et al., The Faiss library, arXiv 2401.08281.
    """
    means, done, _ = _on_all_rows(_by_faiss, rows, means, iterations)
    return means, done


def flash_lloyd(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
) -> tuple[Tensor, int]:
    """Runs the Triton kernels of flash-kmeans, on CUDA.

    flash-kmeans leaves an empty cluster where it was: if one is left at the end, a step of
    :func:`solo_ext.clustering.lloyd.lloyd` at ``precision`` refills it. ``relocate`` has no effect.

    Source:
        Flash-KMeans, arXiv 2603.09229.
    """
    means, done, empty = _on_all_rows(_by_flash, rows, means, iterations)
    if empty:
        means, more = lloyd(rows, means, 1, precision)
        done += more
    return means, done


# (all rows, first means, most iterations) -> means, iterations done, empty clusters
_Train = Callable[[Tensor, Tensor, int], tuple[Tensor, int, int]]


def _on_all_rows(
    train: _Train, rows: Rows, means: Tensor, iterations: int
) -> tuple[Tensor, int, int]:
    """Clusters on rank 0, which collects all ranks' rows while they wait for the result."""
    run = partial(train, rows.collect(), means, iterations)
    found = on_first(run, means.device) if rows.shared else run()
    numbers = torch.zeros(2, dtype=torch.int64, device=means.device)
    if found is not None:
        means, numbers = found[0], torch.tensor(found[1:], device=means.device)
    means = rows.from_first(means.contiguous())
    done, empty = rows.from_first(numbers).tolist()
    return means, done, empty


def _by_faiss(features: Tensor, means: Tensor, iterations: int) -> tuple[Tensor, int, int]:
    # Import faiss here, after torch: imported before it, faiss hangs in forked data workers.
    import faiss

    n, width = features.shape
    on_gpu = features.is_cuda and hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus() > 0
    trained: Any = faiss.Kmeans(
        width,
        len(means),
        niter=iterations,
        max_points_per_centroid=n,
        # faiss warns about clusters with fewer points than this.
        min_points_per_centroid=1,
        gpu=on_gpu,
    )
    trained.train(features.float().cpu().numpy(), init_centroids=means.float().cpu().numpy())
    return torch.from_numpy(trained.centroids).to(means), len(trained.iteration_stats), 0


def _by_flash(features: Tensor, means: Tensor, iterations: int) -> tuple[Tensor, int, int]:
    import flash_kmeans

    run: Any = flash_kmeans.batch_kmeans_Euclid
    # Some code paths of flash-kmeans seed the global generators.
    with torch.random.fork_rng(devices=[features.device] if features.is_cuda else []):
        assignments, found, done = run(
            features.float()[None],
            len(means),
            max_iters=iterations,
            # Stop when the means stand still, which a tolerance of 0 would not detect.
            tol=torch.finfo(torch.float32).tiny,
            init_centroids=means.float()[None].contiguous(),
        )
    sizes = torch.bincount(assignments[0].long(), minlength=len(means))
    return found[0].to(means), int(done), int((sizes == 0).sum())


BACKENDS: dict[str, Backend] = {"torch": lloyd, "faiss": faiss_lloyd, "flash": flash_lloyd}
