"""The choice of a k-means backend, and the calls of faiss and flash-kmeans."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from solo_ext.clustering.rows import blocks
from solo_ext.core.errors import ConfigError, suggest_name

# Backends that need no further package.
_OURS = ("torch", "hierarchical")
# The package that a backend imports, and how to install it.
_NEEDS = {
    "faiss": ("faiss", 'pip install "solo-ext[faiss]" (or "solo-ext[faiss-gpu]" for CUDA)'),
    "flash": ("flash_kmeans", 'pip install "solo-ext[flash-kmeans]"'),
}


def resolve_backend(
    name: str, device: torch.device | str, *, sharded: bool = False, key: str = "backend"
) -> str:
    """Name of the k-means backend that will run: "torch", "hierarchical", "faiss" or "flash".

    "auto" is "torch" on a CPU, where it is the fastest (row `e-step` of `benchmarks`). On
    CUDA it is "flash" if flash-kmeans is installed and ``torch.use_deterministic_algorithms`` is
    off, else "torch". "flash" is "torch" with flash-kmeans' kernel for the nearest mean;
    "hierarchical" is "torch" with a search that is limited to near groups of means. "faiss" cannot
    split the work between ranks.

    Args:
        name: "auto", "torch", "hierarchical", "faiss" or "flash".
        device: the device that computes.
        sharded: whether the rows are spread over several ranks.
        key: key of the config, for error messages.

    Raises:
        ConfigError: an unknown name, a package that is not installed, "flash" without CUDA, or
            rows of several ranks for "faiss".

    Example:
        >>> resolve_backend("auto", "cpu")
        'torch'
    """
    kind = torch.device(device).type
    if name == "auto":
        fast = kind == "cuda" and not torch.are_deterministic_algorithms_enabled()
        return "flash" if fast and _installed("flash") else "torch"
    if name in _OURS:
        return name
    problem, remedy = "", "use auto or torch"
    if name not in _NEEDS:
        problem, remedy = "no such k-means backend", suggest_name(name, ["auto", *_OURS, *_NEEDS])
    elif name == "flash" and kind != "cuda":
        problem = f"needs CUDA, and this runs on {kind}"
    elif name == "faiss" and sharded:
        problem = "clusters in one process, and these rows are spread over several"
    elif not _installed(name):
        problem, remedy = f"the package {_NEEDS[name][0]} is not installed", _NEEDS[name][1]
    if problem:
        raise ConfigError(key, name, problem, remedy)
    return name


def _installed(name: str) -> bool:
    return importlib.util.find_spec(_NEEDS[name][0]) is not None


def by_faiss(features: Tensor, means: Tensor, iterations: int) -> tuple[Tensor, int]:
    """Means and steps done by ``faiss.Kmeans`` on all rows, in fp32, without subsampling.

    It runs on CUDA if the means are there and faiss was built with GPU support.

    Source:
        Douze et al., The Faiss library, arXiv 2401.08281.
    """
    # Import faiss here, after torch: if imported before torch, it hangs in forked data workers.
    import faiss

    n, width = features.shape
    on_gpu = means.is_cuda and hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus() > 0
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


def nearest_by_flash(features: Tensor, means: Tensor) -> Tensor:
    """Index (n,) of every row's nearest mean (K, D) by flash-kmeans' Triton kernel, in TF32.

    The kernel never stores the (n, K) distances. It is compiled again for every K and every number
    of rows in a block.

    Source:
        Flash-KMeans, arXiv 2603.09229.
    """
    found = [
        _by_kernel(block.float(), means.float()) for _, block in blocks(features, means.device)
    ]
    return torch.cat(found)


def _by_kernel(features: Tensor, means: Tensor) -> Tensor:
    from flash_kmeans.assign_euclid_triton import euclid_assign_triton

    # |x - m|^2 = |x|^2 + 2 x.c + |m|^2 - 2 x.(m - c): if c is the centre of the means, the error of
    # the product is proportional to their spread. Terms of x alone do not change which mean is
    # nearest, but the kernel clips distances at 0: |x| |c| in place of x.c keeps them positive.
    centre = means.mean(0)
    length = torch.linalg.vector_norm(features, dim=1)
    of_rows = length * (length + 2 * torch.linalg.vector_norm(centre))
    of_means = means.square().sum(1)
    spread = means - centre
    found: Tensor = euclid_assign_triton(
        features[None], spread[None], of_rows[None], c_sq=of_means[None]
    )
    return found[0].long()
