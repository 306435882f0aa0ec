"""Other implementations of Lloyd's iterations, faiss and flash-kmeans, and which one runs."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from solo_ext.core.errors import ConfigError, nearest

# Package to import, and how to install it.
_NEEDS = {
    "faiss": ("faiss", 'pip install "solo-ext[faiss]" (or "solo-ext[faiss-gpu]" for CUDA)'),
    "flash": ("flash_kmeans", 'pip install "solo-ext[flash-kmeans]"'),
}


def resolve_backend(
    name: str, device: torch.device | str, *, sharded: bool = False, in_file: bool = False
) -> str:
    """Name of the k-means backend that will run: "torch", "faiss" or "flash".

    "auto" is "torch" on a CPU, where the row `e-step` of `benchmarks/speed` finds it the fastest
    and it needs no further package; on CUDA "flash" if flash-kmeans is installed, else "torch".
    Only torch shares the work of several ranks, and reads rows in a file part by part.

    Args:
        name: "auto", "torch", "faiss" or "flash".
        device: where the features are.
        sharded: whether the rows are spread over several ranks.
        in_file: whether the rows are in a file, because memory is too small for them.

    Raises:
        ConfigError: an unknown name, a package that is not installed, "flash" without CUDA, or
            rows that only torch can cluster.

    Example:
        >>> resolve_backend("auto", "cpu")
        'torch'
    """
    kind, alone = torch.device(device).type, not sharded and not in_file
    if name == "auto":
        return "flash" if kind == "cuda" and alone and _installed("flash") else "torch"
    if name == "torch":
        return name
    problem, remedy = "", "use auto or torch"
    if name not in _NEEDS:
        problem, remedy = "no such k-means backend", nearest(name, ["auto", "torch", *_NEEDS])
    elif name == "flash" and kind != "cuda":
        problem = f"needs features on CUDA, these are on {kind}"
    elif in_file:
        problem = "holds all rows in memory, and these are in a file"
        remedy = "take auto or torch, or cluster a sample of them"
    elif sharded:
        problem = "clusters in one process, and these rows are spread over several"
    elif not _installed(name):
        problem, remedy = f"the package {_NEEDS[name][0]} is not installed", _NEEDS[name][1]
    if problem:
        raise ConfigError("backend", name, problem, remedy)
    return name


def _installed(name: str) -> bool:
    return importlib.util.find_spec(_NEEDS[name][0]) is not None


def by_faiss(features: Tensor, means: Tensor, iterations: int) -> tuple[Tensor, int]:
    """Means and steps done by ``faiss.Kmeans`` on all rows, in fp32, without subsampling.

    A faiss with GPU support clusters features on CUDA there.

    Source:
        Douze et al., The Faiss library, arXiv 2401.08281.
    """
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
    return torch.from_numpy(trained.centroids).to(means), len(trained.iteration_stats)


def by_flash(features: Tensor, means: Tensor, iterations: int) -> tuple[Tensor, int, int]:
    """Means, steps done and empty clusters left by the Triton kernels of flash-kmeans, on CUDA.

    Source:
        Flash-KMeans, arXiv 2603.09229.
    """
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
