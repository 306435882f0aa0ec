"""The soft nearest neighbour loss against the paper's formula, one row at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import LOSSES, soft_nearest_neighbor_loss_func

DISTANCES = ["sqeuclidean", "cosine"]


def make(count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64).requires_grad_()
    return x, torch.randint(classes, (count,), generator=generator)


def loop(x: Tensor, targets: Tensor, temperature: float, distance: str) -> Tensor:
    """Eq. 1 of the paper as written, over the rows that have a positive."""

    def weight(i: int, j: int) -> Tensor:
        if distance == "cosine":
            return torch.exp(x[i] @ x[j] / (x[i].norm() * x[j].norm()) / temperature)
        return torch.exp(-(x[i] - x[j]).square().sum() / temperature)

    labels, terms = targets.tolist(), []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        same = [j for j in others if labels[j] == labels[i]]
        if same:
            near, every = (torch.stack([weight(i, j) for j in part]) for part in (same, others))
            terms.append(-(near.sum() / every.sum()).log())
    return torch.stack(terms).mean() if terms else 0 * x.sum()


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 8),
    classes=st.integers(1, 5),
    seed=st.integers(0, 999),
    temperature=st.floats(0.2, 20),
    distance=st.sampled_from(DISTANCES),
)
def test_equals_the_loop(
    count: int, classes: int, seed: int, temperature: float, distance: Any
) -> None:
    x, targets = make(count, classes, seed)
    found = soft_nearest_neighbor_loss_func(x, targets, temperature, distance)
    expected = loop(x, targets, temperature, distance)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("distance", DISTANCES)
def test_gradcheck(distance: Any) -> None:
    x, targets = make(7, 3, 0)
    assert torch.autograd.gradcheck(
        lambda rows: soft_nearest_neighbor_loss_func(rows, targets, 0.7, distance), x
    )


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_is_the_nca_loss_of_pytorch_metric_learning(temperature: float) -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    x, targets = make(12, 4, 1)
    theirs = losses.NCALoss(
        softmax_scale=1 / temperature,
        distance=distances.LpDistance(normalize_embeddings=False, power=2),
    )
    found = soft_nearest_neighbor_loss_func(x, targets, temperature)
    expected = theirs(x, targets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


def test_cosine_is_the_distance_of_unit_rows() -> None:
    """``|a - b|^2 = 2 - 2 a.b``, and the constant falls out."""
    x, targets = make(9, 3, 2)
    found = soft_nearest_neighbor_loss_func(x, targets, 0.5, "cosine")
    expected = soft_nearest_neighbor_loss_func(F.normalize(x, dim=1), targets, 1.0)
    torch.testing.assert_close(found, expected)
    assert not torch.isclose(found, soft_nearest_neighbor_loss_func(x, targets, 1.0))


def test_rows_without_a_positive_are_left_out_but_are_negatives() -> None:
    x, _ = make(5, 1, 3)
    targets = torch.tensor([0, 0, 1, 1, 2])
    loss = soft_nearest_neighbor_loss_func(x, targets)
    nearer = x.detach().clone()
    nearer[4] = nearer[0] + 0.01
    assert soft_nearest_neighbor_loss_func(nearer, targets) > loss
    alone = soft_nearest_neighbor_loss_func(x[:4], targets[:4])
    far = x.detach().clone()
    far[4] = 1e3
    torch.testing.assert_close(soft_nearest_neighbor_loss_func(far, targets), alone)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(
    "targets", [[0, 0, 0, 0], [0, 1, 2, 3]], ids=["no negative", "no positive"]
)
def test_zero_on_the_graph(targets: list[int], distance: Any) -> None:
    x, _ = make(4, 1, 0)
    loss = soft_nearest_neighbor_loss_func(x, torch.tensor(targets), 1.0, distance)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, x)[0].any()


def test_keeps_its_digits_far_away() -> None:
    """Where every weight underflows, what counts is which distance is smaller and by how much."""
    x = torch.tensor([[0.0], [40.0], [0.0], [40.001]], requires_grad=True)
    targets = torch.tensor([0, 0, 1, 1])
    loss = soft_nearest_neighbor_loss_func(x, targets)
    exact = soft_nearest_neighbor_loss_func(x.double(), targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    assert loss.item() == pytest.approx(1600.04, rel=1e-3)
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


def test_defaults() -> None:
    x, targets = make(8, 3, 4)
    expected = soft_nearest_neighbor_loss_func(x, targets, 1.0, "sqeuclidean")
    assert torch.equal(soft_nearest_neighbor_loss_func(x, targets), expected)


def test_refuses() -> None:
    x, targets = torch.ones(3, 2), torch.zeros(3).long()
    for rows, labels in ((x[0], targets[:2]), (x, targets[:2]), (x, targets.unsqueeze(1))):
        with pytest.raises(ValueError, match=r"\(N, D\) and targets \(N,\)"):
            soft_nearest_neighbor_loss_func(rows, labels)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            soft_nearest_neighbor_loss_func(x, targets, temperature)
    unknown: Any = "euclidean"
    with pytest.raises(ValueError, match="distance='euclidean': must be 'sqeuclidean' or 'cosine'"):
        soft_nearest_neighbor_loss_func(x, targets, 1.0, unknown)


def test_is_registered() -> None:
    entry = LOSSES["soft_nearest_neighbor_loss_func"]
    assert entry.target is soft_nearest_neighbor_loss_func
    assert entry.arxiv == "1902.01889"
