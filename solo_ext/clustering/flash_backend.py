"""Lloyd's iterations by flash-kmeans, on CUDA."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from solo_ext.clustering.lloyd import lloyd
from solo_ext.clustering.rows import Rows
from solo_ext.core.distributed import on_first
from solo_ext.core.precision import Precision


def flash_lloyd(
    rows: Rows,
    means: Tensor,
    iterations: int,
    precision: Precision = "highest",
    relocate: bool = False,
) -> tuple[Tensor, int]:
    """Moves the means by the Triton kernels of flash-kmeans.

    Rows of several ranks are brought together on rank 0, as for faiss. flash-kmeans leaves an empty
    cluster where it was: if there is one in the end, a step of
    :func:`solo_ext.clustering.lloyd.lloyd` refills it.

    Args:
        rows: The rows, on CUDA.
        means: (K, D) first means, the same on every rank.
        iterations: Most steps, >= 1.
        precision: Of the step that refills; the kernels have their own.
        relocate: Not used.

    Returns:
        The means (K, D) and the number of steps done.

    Source:
        Flash-KMeans, arXiv 2603.09229.
    """
    joined = rows.collect()
    state = torch.zeros(2, dtype=torch.int64, device=means.device)
    train = partial(_trained, joined, means, iterations)
    found = on_first(train, means.device) if rows.shared else train()
    if found is not None:
        means = found[0]
        state = torch.tensor(found[1:], device=means.device)
    means = rows.from_first(means.contiguous())
    done, empty = (int(value) for value in rows.from_first(state))
    if empty:
        means, more = lloyd(rows, means, 1, precision)
        done += more
    return means, done


def _trained(features: Tensor, means: Tensor, iterations: int) -> tuple[Tensor, int, int]:
    import flash_kmeans

    run: Any = flash_kmeans.batch_kmeans_Euclid
    # It seeds the global generators on some of its paths.
    with torch.random.fork_rng(devices=[features.device] if features.is_cuda else []):
        assignments, found, done = run(
            features.float()[None],
            len(means),
            max_iters=iterations,
            # Stops when the means stand still, which a tolerance of 0 would not notice.
            tol=torch.finfo(torch.float32).tiny,
            init_centroids=means.float()[None].contiguous(),
        )
    sizes = torch.bincount(assignments[0].long(), minlength=len(means))
    return found[0].to(means), int(done), int((sizes == 0).sum())
