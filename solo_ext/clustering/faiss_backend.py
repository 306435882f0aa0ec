"""Lloyd's iterations by faiss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from solo_ext.clustering.rows import Rows
from solo_ext.core.distributed import on_first
from solo_ext.core.precision import Precision


def faiss_lloyd(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
) -> tuple[Tensor, int]:
    """Moves the means by ``faiss.Kmeans``, on all rows, without subsampling.

    Rows of several ranks are brought together on rank 0, where faiss clusters them while the other
    ranks wait (:func:`solo_ext.core.distributed.on_first`). faiss computes in fp32 and holds a
    copy of the rows.

    Args:
        rows: The rows; on CUDA, a faiss with GPU support clusters there.
        means: (K, D) first means, the same on every rank.
        iterations: Most steps, >= 1.
        precision: Not used.
        relocate: Not used.

    Returns:
        The means (K, D) and the number of steps done.

    Source:
        Douze et al., The Faiss library, arXiv 2401.08281.
    """
    joined = rows.collect()
    done = torch.zeros((), dtype=torch.int64, device=means.device)
    train = partial(_trained, joined, means, iterations)
    found = on_first(train, means.device) if rows.shared else train()
    if found is not None:
        means = found[0]
        done.fill_(found[1])
    means = rows.from_first(means.contiguous())
    return means, int(rows.from_first(done))


def _trained(features: Tensor, means: Tensor, iterations: int) -> tuple[Tensor, int]:
    # Only here and after torch: loaded before it, faiss hangs in forked data loader workers.
    import faiss

    n, width = features.shape
    on_gpu = features.is_cuda and hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus() > 0
    trained: Any = faiss.Kmeans(
        width,
        len(means),
        niter=iterations,
        max_points_per_centroid=n,
        # Below this faiss prints a warning.
        min_points_per_centroid=1,
        gpu=on_gpu,
    )
    trained.train(features.float().cpu().numpy(), init_centroids=means.float().cpu().numpy())
    return torch.from_numpy(trained.centroids).to(means), len(trained.iteration_stats)
