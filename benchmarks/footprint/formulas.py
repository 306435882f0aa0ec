"""Bytes of every method by its sizes; compared with real runs in ``tests/benchmarks``.

Symbols: n images, N batch of a process, R processes, V crops, D dimensions of an embedding, K
prototypes or rows of a queue. Embeddings are fp32, indices int64, numbers of clusters int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from solo_ext.core.draws import LARGE

FLOAT, INT, LONG, DOUBLE = 4, 4, 8, 8
TILE = {"cpu": 2**20, "cuda": 2**25}
"""Bytes of a tile of similarities, as in ``solo_ext.kernels.dispatch``."""
RELOCATED = 96
"""Clusters that a step of a warm k-means splits on trial, as in ``solo_ext.clustering``."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process gives to each kind of collective.

    Attributes:
        all_reduce: of tensors that are summed.
        all_gather: of its own part, of which all processes get a copy.
        broadcast: of tensors that the first process sends to all.
    """

    all_reduce: int = 0
    all_gather: int = 0
    broadcast: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.all_reduce + other.all_reduce,
            self.all_gather + other.all_gather,
            self.broadcast + other.broadcast,
        )

    def times(self, count: int) -> Traffic:
        """That of ``count`` such calls."""
        return Traffic(count * self.all_reduce, count * self.all_gather, count * self.broadcast)

    def sent(self, processes: int) -> float:
        """Bytes that leave a process where collectives run in rings, as NCCL's do for large ones.

        A sum goes round twice, ``2 (R - 1) / R`` of its bytes; of an all-gather each process passes
        on R - 1 parts; a broadcast is passed on once.

        Args:
            processes: R.
        """
        others = processes - 1
        return 2 * others / processes * self.all_reduce + others * self.all_gather + self.broadcast


class Footprint(NamedTuple):
    """Of one method, on every process.

    Attributes:
        state: bytes of its state buffers, which checkpoints hold.
        step: its own collectives in a training step; those of DDP come on top.
        temporary: what its loss holds at a time, about; fp32.
    """

    state: int
    step: Traffic
    temporary: int


class Sizes(NamedTuple):
    """Of a run.

    Attributes:
        images: n.
        batch: N, of a process.
        processes: R.
        dim: D.
        views: V, all of them large.
        tile: bytes of a tile.
    """

    images: int
    batch: int
    processes: int
    dim: int = 128
    views: int = 2
    tile: int = TILE["cuda"]

    @property
    def embeddings(self) -> int:
        """Bytes of one view's embeddings of a process."""
        return FLOAT * self.batch * self.dim

    @property
    def share(self) -> int:
        """Samples of the first process, the largest share."""
        return -(-self.images // self.processes)


def in_batch(s: Sizes) -> Footprint:
    """``debiased``, ``hard_negative``: all views of all processes are candidates.

    Sends V N D gathered, and the gradient of the V R N D candidates back, summed.
    """
    candidates = s.views * s.processes * s.embeddings
    step = Traffic(all_reduce=candidates, all_gather=s.views * s.embeddings)
    similarities = FLOAT * s.views * s.batch * s.views * s.processes * s.batch
    return Footprint(0, step, 4 * candidates + 2 * min(4 * s.tile, similarities))


def mochi(s: Sizes, queue: int, num_pair_mixes: int) -> Footprint:
    """A queue of K rows per view; their keys are gathered."""
    step = Traffic(all_gather=s.views * s.embeddings)
    widest = FLOAT * max(queue, num_pair_mixes * s.dim)
    rows = max(min(6 * s.tile // widest, s.batch), 8)
    return Footprint(s.views * FLOAT * queue * s.dim, step, 2 * rows * widest)


def nearest_neighbours(s: Sizes, support: int, top_k: int = 1) -> Footprint:
    """``nnclr_symmetric``: a support set whose rows have an index and a label.

    Gathered are all predictions, with gradient, all neighbours, and the first view's keys with
    index and label.
    """
    own = s.embeddings
    step = Traffic(
        all_reduce=s.views * s.processes * own,
        all_gather=s.views * (1 + top_k) * own + own + 2 * LONG * s.batch,
    )
    candidates = s.views * (1 + top_k) * s.processes * own
    similarities = FLOAT * s.batch * s.processes * s.batch
    tile = max(s.tile, min(4 * s.tile, similarities))
    return Footprint(support * (FLOAT * s.dim + 2 * LONG), step, 2 * (candidates + tile))


def clusters(s: Sizes, counts: Sequence[int], bank: bool = False) -> int:
    """State of an E-step: means, prototypes, concentrations, assignments, and the bank.

    ``(8 D + 4) sum K + 4 M n / R``, with a bank ``(4 D + 1) n / R`` more; shares are rounded up.
    """
    row = len(counts) * INT + (FLOAT * s.dim + 1 if bank else 0)
    return sum(counts) * (2 * FLOAT * s.dim + FLOAT) + s.share * row


def look_up(s: Sizes, counts: Sequence[int]) -> Traffic:
    """A batch's clusters: its indices gathered, and the clusters of all processes' batches."""
    numbers = len(counts) * INT * s.processes * s.batch
    return Traffic(all_reduce=numbers, all_gather=LONG * s.batch)


def metric(s: Sizes, counts: Sequence[int], bank: bool = False) -> Footprint:
    """A margin loss on clusters: cosines of all crops with all classes."""
    written = Traffic(all_gather=s.embeddings + LONG * s.batch if bank else 0)
    cosines = FLOAT * s.views * s.batch * counts[0]
    return Footprint(clusters(s, counts, bank), look_up(s, counts) + written, 3 * cosines)


def pcl(
    s: Sizes, queue: int, counts: Sequence[int], *, directions: int = 1, bank: bool = False
) -> Footprint:
    """A queue per direction and the clusters; keys are gathered, with a bank their indices too."""
    written = Traffic(all_gather=directions * s.embeddings + (LONG * s.batch if bank else 0))
    state = directions * FLOAT * queue * s.dim + clusters(s, counts, bank)
    return Footprint(state, look_up(s, counts) + written, 5 * s.tile // 2)


def assignments(s: Sizes, prototypes: int, targets: int, iterations: int = 3) -> Footprint:
    """``protocpc``, ``protoseed``: a prior, and Sinkhorn's sums of the prototypes' masses.

    ``iterations + 1`` sums of K per target view, of which the last is the prior's; with softmax
    (0 iterations) two. Held are each target view's exponentials, a block of the student's and the
    prototypes' gradient.
    """
    sums = targets * (max(iterations, 1) + 1)
    matrix = FLOAT * s.batch * prototypes
    temporary = targets * matrix + min(32 * s.tile, matrix) + FLOAT * prototypes * s.dim
    return Footprint(FLOAT * prototypes, Traffic(all_reduce=FLOAT * sums * prototypes), temporary)


def seed(s: Sizes, queue: int, queues: int = 1) -> Footprint:
    """A queue of the teacher's embeddings, another one for small crops with their own targets."""
    step = Traffic(all_gather=queues * s.embeddings)
    return Footprint(queues * FLOAT * queue * s.dim, step, s.tile)


def ddp(parameters: int, batch_norm: int) -> Traffic:
    """Gradients of all that learns, and the statistics of batch norm before a forward pass.

    Args:
        parameters: P, elements.
        batch_norm: bytes of its buffers, those of momentum networks included.
    """
    return Traffic(all_reduce=FLOAT * parameters, broadcast=batch_norm)


def e_step(
    s: Sizes,
    counts: Sequence[int],
    iterations: int,
    *,
    embedder: int,
    warm: bool = False,
    restarts: int = 1,
    embeds: bool = True,
    bank: bool = False,
    matched: bool = False,
) -> Traffic:
    """k-means of all granularities with the torch backend, if no iteration is spared.

    An iteration sums ``8 K (D + 1)`` bytes. To be compared with labels, each granularity's clusters
    are gathered, of at most 2^24 images. Processes meet, with 8 bytes, before every sum or
    broadcast and at the end of what an error of one of them ends for all.

    Args:
        s: sizes; those of the batch play no part.
        counts: K of each granularity.
        iterations: of k-means.
        embedder: bytes of the batch norm of the networks that embed.
        warm: from the means of the last E-step, with relocation.
        restarts: of a cold one.
        embeds: images are passed through the networks, at most 15 batches of each process.
        bank: features come from the bank as far as it has them.
        matched: a margin loss's weights follow the clusters, by a table of ``8 K^2``.
    """
    total = Traffic(all_reduce=LONG * ((4 if embeds else 2) + bank), broadcast=embedder)
    compared = -(-s.share // -(-s.images // LARGE))
    told = Traffic(all_reduce=DOUBLE + 3 * LONG, all_gather=INT * compared)
    # Of all granularities at once: what the rows are, and the end of k-means.
    total += Traffic(all_reduce=2 * DOUBLE + 4 * LONG, all_gather=LONG) + Traffic(LONG)
    for k in counts:
        means, tried = FLOAT * k * s.dim, min(RELOCATED, k)
        step = Traffic(all_reduce=DOUBLE * k * s.dim + LONG * k + LONG + 3 * LONG)
        start = Traffic(broadcast=means) if warm else Traffic(all_reduce=means)
        if warm:
            halves = 3 * tried * (DOUBLE * s.dim + LONG)
            merged = LONG * k
            step += Traffic(DOUBLE * k + halves + merged + 10 * LONG, broadcast=4 * LONG * tried)
        outcome = Traffic(all_reduce=2 * DOUBLE + 2 * LONG)
        placed = Traffic(all_reduce=LONG * k + FLOAT + DOUBLE * k + 3 * LONG) + told
        runs = (start + Traffic(LONG) + step.times(iterations) + outcome).times(restarts)
        total += runs + placed + Traffic(LONG * k**2 if matched else 0)
    return total


def e_step_memory(
    s: Sizes, counts: Sequence[int], *, hierarchical: bool = False
) -> tuple[int, int]:
    """Bytes in an E-step: a process's share of the features, and the most of other numbers a row.

    ``4 D n / R``, none of it on the device with ``features_dir``, and ``(36 + 16 M) n / R``: which
    samples they are, the clusters as they were, as k-means finds them with distances, and the 28
    bytes of a row that k-means needs for a moment, relocation included. Hierarchical k-means needs
    up to 22 more. Tiles, and the block that features are read in, come on top.
    """
    moment = 50 if hierarchical else 28
    numbers = LONG + moment + (LONG + FLOAT + INT) * len(counts)
    return FLOAT * s.dim * s.share, numbers * s.share


def listing(s: Sizes, name: int) -> int:
    """Bytes of the listing of image files: names, where every 64th begins, and targets.

    Args:
        s: sizes, of which the number of images counts.
        name: characters of a name below the data's folder, and the one that ends it.
    """
    return s.images * (name + INT) + LONG * (-(-s.images // 64) + 1)


def kmeans_multiplications(s: Sizes, counts: Sequence[int], iterations: int) -> int:
    """Multiplications of a process in k-means: each iteration, and the last assignment.

    ``n D (iterations + 1) sum K / R``; relocation, of warm ones, comes on top.
    """
    return s.images * s.dim * (iterations + 1) * sum(counts) // s.processes


def perceptron(
    *widths: int, batch_norm: bool = True, last_batch_norm: bool = False
) -> tuple[int, int]:
    """Parameters and bytes of batch norm's buffers, of linear layers from width to width."""
    parameters = buffers = 0
    for number, (width, following) in enumerate(pairwise(widths), start=2):
        normalised = last_batch_norm if number == len(widths) else batch_norm
        parameters += width * following + following * (2 if normalised else 1)
        buffers += 2 * FLOAT * following + LONG if normalised else 0
    return parameters, buffers
