"""Metric learning: contrastive, triplet, lifted structure, N-pair, soft nearest neighbour."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels.dispatch import once_differentiable
from solo_ext.kernels.normalized import normalized
from solo_ext.losses.common import (
    LOSSES,
    check_not_negative,
    check_positive,
    check_rows,
)
from solo_ext.losses.contrastive import own_columns


def row_distances(x: Tensor, y: Tensor) -> Tensor:
    """(N,) distances of row i of ``x`` to row i of ``y``, both (N, D); gradient 0 at distance 0.

    Example:
        >>> row_distances(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([5.])
    """
    distances: Tensor = torch.linalg.vector_norm(x - y, dim=1)
    return distances


def pairwise_distances(x: Tensor, y: Tensor) -> Tensor:
    """(N, M) distances of every row of ``x`` to every row of ``y``; gradient 0 at distance 0.

    Distances are norms of differences, not expanded into products, so that they are accurate for
    close rows. The gradient is computed by matrix products, in half the time of ``torch.cdist``'s
    for large batches, and without the (N, M, D) differences that the latter holds on a GPU.

    Example:
        >>> pairwise_distances(torch.zeros(2, 3), torch.ones(5, 3)).shape
        torch.Size([2, 5])
    """
    # A view, because torch.compile rejects the same tensor twice, which one process would pass.
    return _PairwiseDistances.apply(x, y.view_as(y))  # type: ignore[no-any-return, no-untyped-call]


class _PairwiseDistances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(x, y, distances)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, distances = ctx.saved_tensors
        weights = torch.where(distances > 0, grad / distances, 0.0)
        # Centre the rows, which changes no distance: the products below would otherwise lose the
        # small differences of rows that have collapsed to one point.
        centre = y.mean(0)
        x, y = x - centre, y - centre
        with full_precision_products(grad.device):
            of_x = weights.sum(1, keepdim=True) * x - weights @ y
            return of_x, weights.sum(0).unsqueeze(1) * y - weights.T @ x


def own_pairs(rows: Tensor) -> Tensor:
    """Mask (N, G) of the entries where column j is local row i; G counts the rows of all ranks.

    Example:
        >>> own_pairs(torch.randn(2, 8))
        tensor([[ True, False],
                [False,  True]])
    """
    columns = torch.arange(len(rows) * distributed.world_size(), device=rows.device)
    return own_columns(rows) == columns


def _class_pairs(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Masks (N, G) of a row's positives and of its negatives in the joined batch, by class."""
    same = targets.unsqueeze(1) == distributed.gather(targets)
    return same & ~own_pairs(targets), ~same


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Values (N, G) where the mask is true, minus infinity elsewhere.

    A row without any true entry becomes all 0: if it were all minus infinity, the backward pass of
    a log-sum-exp would give NaN.

    Example:
        >>> keep(torch.ones(2, 2), torch.tensor([[True, False], [False, False]]))
        tensor([[1., -inf],
                [0., 0.]])
    """
    kept = values.masked_fill(~mask, float("-inf"))
    return kept.masked_fill(~mask.any(1, keepdim=True), 0.0)


def _joined_mean(total: Tensor, count: Tensor) -> Tensor:
    """This rank's part of a mean over the joined batch, from its own sum and number of terms.

    DDP averages the parts over ranks, which gives the sum of all terms over their number; 0 if
    there are none.

    Example:
        >>> _joined_mean(torch.tensor(6.0), torch.tensor(4))
        tensor(1.5000)
    """
    counts = distributed.gather(count.reshape(1)).sum().clamp(min=1)
    return distributed.world_size() * total / counts


@LOSSES.register(
    "contrastive_loss_func",
    paper="Dimensionality Reduction by Learning an Invariant Mapping",
    year=2006,
)
def contrastive_loss_func(x: Tensor, y: Tensor, same: Tensor, margin: float = 1.0) -> Tensor:
    """Pulls pairs of the same class together and pushes other pairs apart, up to a margin.

    ``d^2`` for a pair of the same class, ``max(0, margin - d)^2`` for any other, d the Euclidean
    distance; mean over the pairs (Eq. 4 of Hadsell, Chopra and LeCun, CVPR 2006, without its factor
    1/2).

    Args:
        x: (N, D), any scale.
        y: (N, D), any scale; row i is paired with row i of ``x``.
        same: (N,) bool, whether both rows of the pair have the same class.
        margin: distance beyond which pairs of different classes cost nothing, at least 0.

    Example:
        >>> x, y = torch.zeros(2, 2), torch.tensor([[0.6, 0.0], [0.6, 0.0]])
        >>> contrastive_loss_func(x, y, same=torch.tensor([True, False]))  # (0.6^2 + 0.4^2) / 2
        tensor(0.2600)
    """
    check_rows(x=x, y=y)
    check_not_negative(margin=margin)
    if same.shape != x.shape[:1]:
        raise ValueError(f"same must be ({len(x)},), one per pair, got {tuple(same.shape)}")
    x, y = full_precision(x, y)
    distances = row_distances(x, y)
    apart = (margin - distances).relu()
    return torch.where(same.bool(), distances, apart).square().mean()


@LOSSES.register(
    "triplet_loss_func",
    paper="FaceNet: A Unified Embedding for Face Recognition and Clustering",
    year=2015,
    arxiv="1503.03832",
)
def triplet_loss_func(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, squared: bool = True
) -> Tensor:
    """Hinge loss: the negative should be farther from the anchor than the positive, by a margin.

    ``max(0, d(a, p)^2 - d(a, n)^2 + margin)``, d the Euclidean distance, mean over the triplets
    (section 3.1 of Schroff et al., CVPR 2015, where it is a sum).

    Args:
        anchor: (N, D), any scale.
        positive: (N, D), any scale; row i has the class of anchor i.
        negative: (N, D), any scale; row i has another class than anchor i.
        margin: at least 0.
        squared: whether distances are squared, as in the paper; many libraries do not.

    Returns:
        Scalar; if all rows are equal, it is the margin and the gradient is 0.

    Example:
        >>> anchor, positive = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
        >>> triplet_loss_func(anchor, positive, negative=torch.tensor([[0.0, 1.1]]))
        tensor(0.7900)
    """
    check_rows(anchor=anchor, positive=positive, negative=negative)
    check_not_negative(margin=margin)
    anchor, positive, negative = full_precision(anchor, positive, negative)
    near, far = row_distances(anchor, positive), row_distances(anchor, negative)
    if squared:
        near, far = near.square(), far.square()
    return (near - far + margin).relu().mean()


@LOSSES.register(
    "lifted_structured_loss_func",
    paper="Deep Metric Learning via Lifted Structured Feature Embedding",
    year=2015,
    arxiv="1511.06452",
)
def lifted_structured_loss_func(
    x: Tensor, targets: Tensor, margin: float = 1.0, smooth: bool = True
) -> Tensor:
    """Compares every positive pair with all negatives of both its rows.

    ``1 / (2 P) sum_(i,j) max(0, J_ij)^2`` over the P unordered positive pairs in the joined
    batch, with ``J_ij = D_ij + log(sum_k exp(m - D_ik) + sum_l exp(m - D_jl))`` or, not smooth,
    ``J_ij = D_ij + max(max_k (m - D_ik), max_l (m - D_jl))``; D the Euclidean distance, m the
    margin, k and l over the rows of other classes (Oh Song et al., CVPR 2016).

    Args:
        x: (N, D), any scale, compared with the rows of all processes.
        targets: (N,) integers, the classes.
        margin: m, finite.
        smooth: whether to use the log-sum-exp instead of the maximum.

    Example:
        >>> x, targets = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
        >>> lifted_structured_loss_func(x, targets).shape
        torch.Size([])
    """
    _check_labelled(x, targets)
    if not math.isfinite(margin):
        raise ValueError(f"margin={margin}: must be finite")
    (x,) = full_precision(x)
    distances = pairwise_distances(x, distributed.gather_with_gradient(x))
    positive, negative = _class_pairs(targets)
    pushes = keep(margin - distances, negative)
    push = pushes.logsumexp(1) if smooth else pushes.amax(1)
    both = torch.logaddexp if smooth else torch.maximum
    push = both(push.unsqueeze(1), distributed.gather_with_gradient(push))
    # Both rows of a positive pair have the same class, hence the same negatives.
    counted = positive & negative.any(1, keepdim=True)
    cost = torch.where(counted, distances + push, 0.0).relu().square()
    # Every pair occurs twice in the sum and in the number; the 1/2 is that of the formula.
    return _joined_mean(cost.sum(), positive.sum()) / 2


@LOSSES.register(
    "n_pair_loss_func",
    paper="Improved Deep Metric Learning with Multi-class N-pair Loss Objective",
    year=2016,
)
def n_pair_loss_func(anchor: Tensor, positive: Tensor, l2_reg: float = 0.0) -> Tensor:
    """Softmax cross-entropy of each anchor's positive against the positives of other pairs.

    ``log(1 + sum_{j != i} exp(a_i.p_j - a_i.p_i))``, mean over the anchors, j over the pairs of
    the joined batch; plus ``l2_reg / 4 (mean |a_i|^2 + mean |p_i|^2)`` (Sohn, NIPS 2016). Rows are
    not normalised: without ``l2_reg``, longer rows alone lower the loss.

    Args:
        anchor: (N, D), any scale.
        positive: (N, D), any scale; pairs of one class count as each other's negatives.
        l2_reg: weight of the squared norms, at least 0.

    Returns:
        Scalar; for a single pair without ``l2_reg``, a differentiable zero.

    Example:
        >>> n_pair_loss_func(torch.zeros(4, 8), torch.zeros(4, 8))  # ln 4
        tensor(1.3863)
    """
    check_rows(anchor=anchor, positive=positive)
    check_not_negative(l2_reg=l2_reg)
    anchor, positive = full_precision(anchor, positive)
    with full_precision_products(anchor.device):
        logits = anchor @ distributed.gather_with_gradient(positive).T
        loss = F.cross_entropy(logits, own_columns(anchor).squeeze(1))
        if l2_reg:
            norms = anchor.square().sum(1) + positive.square().sum(1)
            loss = loss + 0.25 * l2_reg * norms.mean()
        return loss


Distance = Literal["sqeuclidean", "cosine"]


@LOSSES.register(
    "soft_nearest_neighbor_loss_func",
    paper="Analyzing and Improving Representations with the Soft Nearest Neighbor Loss",
    year=2019,
    arxiv="1902.01889",
)
def soft_nearest_neighbor_loss_func(
    x: Tensor, targets: Tensor, temperature: float = 1.0, distance: Distance = "sqeuclidean"
) -> Tensor:
    """Negative log-probability that a neighbour, sampled by distance, has the row's class.

    ``-log(sum_{j in P(i)} exp(-f_ij / T) / sum_{k != i} exp(-f_ik / T))``, P(i) the other rows of
    the class of i in the joined batch; mean over the rows whose P(i) is not empty (Eq. 1 of Frosst
    et al., ICML 2019, which assumes that no P(i) is empty).

    Args:
        x: (N, D), any scale, compared with the rows of all processes.
        targets: (N,) integers, the classes.
        temperature: T, above 0.
        distance: f; ``sqeuclidean``: the squared Euclidean distance of the raw rows;
            ``cosine``: minus the cosine.

    Example:
        >>> x, targets = torch.zeros(4, 2), torch.tensor([0, 0, 1, 1])
        >>> soft_nearest_neighbor_loss_func(x, targets)  # one of three equal neighbours is right
        tensor(1.0986)
    """
    _check_labelled(x, targets)
    check_positive(temperature=temperature)
    if distance not in get_args(Distance):
        raise ValueError(f"distance={distance!r}: must be 'sqeuclidean' or 'cosine'")
    (x,) = full_precision(x)
    with full_precision_products(x.device):
        if distance == "cosine":
            x = normalized(x)
            logits = x @ distributed.gather_with_gradient(x).T / temperature
        else:
            distances = pairwise_distances(x, distributed.gather_with_gradient(x))
            logits = distances.square() * (-1 / temperature)
        positive, negative = _class_pairs(targets)
        advantage = keep(logits, positive).logsumexp(1) - keep(logits, negative).logsumexp(1)
        counted = positive.any(1)
        # Without negatives, the neighbour always has the row's class, and the loss is 0.
        loss = torch.where(counted & negative.any(1), -F.logsigmoid(advantage), 0.0)
        return _joined_mean(loss.sum(), counted.sum())


def _check_labelled(x: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless the rows are (N, D) and there is one class for each."""
    if x.ndim != 2 or targets.shape != x.shape[:1]:
        raise ValueError(
            f"x must be (N, D) and targets (N,), got {tuple(x.shape)} and {tuple(targets.shape)}"
        )
