"""k-means of PCL's E-step, its forms, and the concentrations.

Clusters 50,000 x 128 unit features at K = 250, 500 and 1000. The peer is faiss as the PCL recipe
calls it: it starts anew (niter 20, nredo 5, max_points_per_centroid 1000,
min_points_per_centroid 10, seed = position) and then searches once. Ours starts from the means of
the features of "the epoch before" (20 iterations, 5 restarts, not timed), does 5 iterations, the
final assignment and the concentrations. Objectives are means of squared distances computed alike;
the difference is the largest of ours over the recipe's, less 1.

Of hard data every row moves by itself, to a mean cosine of 0.95. Of separated data all rows move by
one random map for one half, which moves the modes too and so leaves a warm start without relocation
in an optimum that is no longer a good one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Work
from benchmarks.operation import EXACT, Case, Goal, Setup, peer, relative
from benchmarks.record import Effort
from solo_ext.clustering import cluster_concentration, kmeans, multi_granularity_kmeans
from solo_ext.clustering.lloyd import distances_to

ROWS, WIDTH, CLUSTERS = 50_000, 128, (250, 500, 1000)
WARM_ITERATIONS, TEMPERATURE, DRIFT = 5, 0.2, 0.33
RECIPE = "faiss, PCL's recipe"
OBJECTIVE, HIERARCHICAL = 0.003, 0.1
"""Most that objectives may be above the recipe's, and a hierarchical clustering's above a flat one.

The latter is of rows without any hierarchy; of features of images it is 0.019.
"""
Found = list[tuple[Tensor, Tensor]]
"""Means and assignments of each granularity."""


def features(effort: Effort, separated: bool = False) -> tuple[Tensor, Tensor]:
    """Features of one epoch and the next, unit rows."""
    rows = effort.size(ROWS)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, WIDTH, generator=draw)
    modes = torch.randn(1000 if separated else 2000, WIDTH, generator=draw)
    own = torch.randint(len(modes), (rows,), generator=draw)
    if separated:
        made = F.normalize(modes, dim=1)[own] + 0.3 / WIDTH**0.5 * noise
    else:
        # Modes no further apart than they are wide, in a power-law spectrum.
        made = (modes[own] + noise) * torch.arange(1, WIDTH + 1) ** -0.5
    old = F.normalize(made, dim=1)
    step = F.normalize(torch.randn(rows, WIDTH, generator=draw), dim=1)
    if separated:
        shared = old @ torch.randn(WIDTH, WIDTH, generator=draw)
        step = (step + F.normalize(shared, dim=1)) / 2**0.5
    new = F.normalize(old + DRIFT * step, dim=1)
    return old.to(effort.device), new.to(effort.device)


def recipe(faiss: Any, x: Tensor, counts: Sequence[int]) -> Found:
    """faiss as PCL calls it, whose index lies where the features are."""
    resources = faiss.StandardGpuResources() if x.is_cuda else None
    rows = x.cpu().numpy()
    found = []
    for seed, count in enumerate(counts):
        clustering = faiss.Clustering(WIDTH, count)
        clustering.niter, clustering.nredo, clustering.seed = 20, 5, seed
        clustering.max_points_per_centroid, clustering.min_points_per_centroid = 1000, 10
        on_gpu = resources is not None
        index = faiss.GpuIndexFlatL2(resources, WIDTH) if on_gpu else faiss.IndexFlatL2(WIDTH)
        clustering.train(rows, index)
        assignments = torch.from_numpy(index.search(rows, 1)[1][:, 0])
        means = faiss.vector_to_array(clustering.centroids).reshape(count, WIDTH)
        found.append((torch.from_numpy(means).to(x.device), assignments.to(x.device)))
    return found


def ours(x: Tensor, init: list[Tensor], backend: str) -> Found:
    """A warm start; the concentrations are computed too."""
    counts = [len(means) for means in init]
    found = multi_granularity_kmeans(
        x, counts, init=init, iterations=WARM_ITERATIONS, backend=backend
    )
    for count, c in zip(counts, found, strict=True):
        cluster_concentration(c.distances, c.assignments, count, TEMPERATURE)
    return [(c.means, c.assignments) for c in found]


def worse(x: Tensor, found: Found, expected: Found) -> float:
    """Largest objective over the expected one, of all granularities, less 1."""
    sums = [
        [float(distances_to(x, *f).double().square().mean()) for f in o] for o in (found, expected)
    ]
    return max(float(a / b) for a, b in zip(*sums, strict=True)) - 1


def e_step(effort: Effort, separated: bool) -> Setup:
    """The recipe and ours."""
    counts = [effort.size(k) for k in CLUSTERS]
    old, new = features(effort, separated)
    # The first E-step is cold and takes the recipe's restarts; it is paid once, not every epoch.
    init = [c.means for c in multi_granularity_kmeans(old, counts, restarts=5)]

    def by_faiss(faiss: Any) -> Work | str:
        if new.is_cuda and not hasattr(faiss, "StandardGpuResources"):
            return "peer not installed: faiss-gpu"
        faiss.omp_set_num_threads(1)
        return partial(recipe, faiss, new, counts)

    name, module = ("flash", "flash_kmeans") if new.is_cuda else ("faiss", "faiss")
    return Setup(
        {
            "ours": partial(ours, new, init, "torch"),
            RECIPE: peer("faiss", by_faiss),
            name: peer(module, lambda _: partial(ours, new, init, name)),
        },
        partial(worse, new),
    )


def granularities(effort: Effort) -> Setup:
    """All at once beside each by itself."""
    x = features(effort)[0]
    tables = [x[: effort.size(k)] for k in CLUSTERS]
    return Setup(
        {
            "ours": lambda: ours(x, tables, "torch"),
            "one by one": lambda: [ours(x, [table], "torch")[0] for table in tables],
        }
    )


def hierarchical(effort: Effort) -> Setup:
    """Five hierarchical iterations beside twenty flat ones."""
    x, count = features(effort)[0], effort.size(2000)

    def clustered(backend: str, iterations: int) -> Found:
        found = kmeans(x, count, iterations=iterations, backend=backend)
        return [(found.means, found.assignments)]

    return Setup(
        {
            "ours": lambda: clustered("hierarchical", 5),
            "flat, 20 iterations": lambda: clustered("torch", 20),
        },
        partial(worse, x),
    )


def in_a_file(effort: Effort) -> Setup:
    """Features in a file beside the same in memory."""
    x = features(effort)[0]
    with tempfile.TemporaryFile() as file:
        on_disk = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=tuple(x.shape)))
    on_disk.copy_(x)
    init = [x[: effort.size(1000)]]
    return Setup(
        {"ours": lambda: ours(on_disk, init, "torch"), "memory": lambda: ours(x, init, "torch")},
        partial(worse, x),
    )


def in_lists(distances: Tensor, assignments: Tensor, count: int) -> Tensor:
    """The concentrations in the recipe's manner: an array entry at a time into Python lists."""
    squared = distances.square().numpy()[:, None]
    members: list[list[np.float32]] = [[] for _ in range(count)]
    for row, cluster in enumerate([int(c) for c in assignments.numpy()]):
        members[cluster].append(squared[row][0])
    raw = np.zeros(count)
    for cluster, own in enumerate(members):
        if len(own) > 1:
            raw[cluster] = (np.asarray(own) ** 0.5).mean() / np.log(len(own) + 10)
    for cluster, own in enumerate(members):
        if len(own) <= 1:
            raw[cluster] = raw.max()
    raw = raw.clip(np.percentile(raw, 10), np.percentile(raw, 90))
    return torch.from_numpy(TEMPERATURE * raw / raw.mean()).to(distances.dtype)


def concentrations(effort: Effort) -> Setup:
    """Of 50,000 rows in 1000 clusters."""
    rows, count = effort.size(ROWS), effort.size(1000)
    distances, assignments = torch.rand(rows), torch.randint(count, (rows,))
    return Setup(
        {
            "ours": lambda: cluster_concentration(distances, assignments, count, TEMPERATURE),
            "lists (PCL)": lambda: in_lists(distances, assignments, count),
        },
        relative,
    )


# On separated data faiss ends each start when it has converged. Ours takes 1.1 to 1.4 s everywhere,
# the recipe 29.5 s (hard) and 12.6 s (separated) on an EPYC with AVX2, 21.3 s and 9.7 s on a Xeon
# with AVX-512: the targets are of the latter.
CASES = (
    Case(
        "k-means, hard data, own drift",
        partial(e_step, separated=False),
        (
            Goal(RECIPE, 15, most_difference=OBJECTIVE),
            Goal(RECIPE, 10, ours="faiss", most_difference=OBJECTIVE),
            Goal(RECIPE, 30, ours="flash", device="cuda"),
        ),
        rounds=3,
    ),
    Case(
        "k-means, separated data, shared drift",
        partial(e_step, separated=True),
        # faiss alone does not relocate a warm start: its objective is another one.
        (Goal(RECIPE, 7.7, most_difference=OBJECTIVE), Goal(RECIPE, 4.3, ours="faiss")),
        rounds=3,
    ),
)
FORMS = (
    Case("E-step of three granularities", granularities, (Goal("one by one", 0.95),)),
    Case(
        "hierarchical k-means, K 2,000",
        hierarchical,
        (Goal("flat, 20 iterations", 0, most_difference=HIERARCHICAL),),
        rounds=2,
    ),
    Case("E-step of features in a file", in_a_file, (Goal("memory", 0, most_difference=0),)),
)
CONCENTRATIONS = (
    Case(
        "concentrations, 50,000 rows, K 1000",
        concentrations,
        (Goal("lists (PCL)", 10, most_difference=EXACT),),
    ),
)
CONCENTRATIONS = (
    Case(
        "concentrations, 50,000 rows, K 1000",
        concentrations,
        (Goal("lists (PCL)", 10, most_difference=EXACT),),
    ),
)
