"""Pair, triplet, lifted structured and soft nearest neighbour losses against their formulas."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import (
    contrastive_loss_func,
    lifted_structured_loss_func,
    soft_nearest_neighbor_loss_func,
    triplet_loss_func,
)
from solo_ext.losses.metric import pairwise_distances, row_distances
from tests.losses.conftest import same


def rows(count: int, dim: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64)


def test_equal_the_loop() -> None:
    x, y = rows(4), rows(6, seed=1)
    found = pairwise_distances(x, y)
    for i, a in enumerate(x.tolist()):
        for j, b in enumerate(y.tolist()):
            assert found[i, j].item() == pytest.approx(math.dist(a, b), rel=1e-12)
    torch.testing.assert_close(row_distances(x, y[:4]), found.diagonal(), rtol=1e-12, atol=0)


def test_equal_rows_have_distance_and_gradient_zero() -> None:
    x = rows(1).expand(4, 5).clone().requires_grad_()
    distances = pairwise_distances(x, x)
    assert not distances.any()
    (gradient,) = torch.autograd.grad(distances.sum() + row_distances(x, x.detach()).sum(), x)
    assert not gradient.any()


def test_keep_their_digits_where_rows_have_collapsed() -> None:
    """Rows that differ in their last digits, far from the origin."""
    close = (10 + 1e-4 * rows(32, 16)).float()
    weights = rows(32, 32, seed=1)
    gradients: list[Tensor] = []
    for x in (close, close.double()):
        x = x.clone().requires_grad_()
        distances = pairwise_distances(x, x)
        gradients += torch.autograd.grad((distances * weights.to(x.dtype)).sum(), x)
    assert (gradients[0].double() - gradients[1]).norm() < 1e-5 * gradients[1].norm()


DRAWN = settings(deadline=None, max_examples=30)


def make_rows(count: int, seed: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(number, count, 4, generator=generator, dtype=torch.float64)
    return [z.requires_grad_() for z in rows]


close = partial(same, values=(1e-10, 1e-12), slopes=(1e-9, 1e-12))


@DRAWN
@given(count=st.integers(1, 6), seed=st.integers(0, 999), margin=st.floats(0, 5))
def test_contrastive_equals_the_loop(count: int, seed: int, margin: float) -> None:
    x, y = make_rows(count, seed, 2)
    same = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5
    terms = []
    for i in range(count):
        distance = sum((a - b) ** 2 for a, b in zip(x[i], y[i], strict=True)) ** 0.5
        lacking = torch.maximum(margin - distance, torch.zeros(()))
        terms.append(distance**2 if same[i] else lacking**2)
    close(contrastive_loss_func(x, y, same, margin), torch.stack(terms).mean(), [x, y])


@DRAWN
@given(
    count=st.integers(1, 6), seed=st.integers(0, 999), margin=st.floats(0, 5), squared=st.booleans()
)
def test_triplet_equals_the_loop(count: int, seed: int, margin: float, squared: bool) -> None:
    inputs = make_rows(count, seed, 3)
    power, terms = (2 if squared else 1), []
    for anchor, positive, negative in zip(*inputs, strict=True):
        near = ((anchor - positive) ** 2).sum().sqrt() ** power
        far = ((anchor - negative) ** 2).sum().sqrt() ** power
        terms.append(torch.maximum(near - far + margin, torch.zeros(())))
    close(triplet_loss_func(*inputs, margin, squared), torch.stack(terms).mean(), inputs)


def make(count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64).requires_grad_()
    return x, torch.randint(classes, (count,), generator=generator)


def loop(x: Tensor, targets: Tensor, margin: float, smooth: bool) -> Tensor:
    """The sum over unordered positive pairs as written, on scalars that carry a gradient."""

    def distance(i: int, j: int) -> Tensor:
        return (x[i] - x[j]).square().sum().sqrt()

    labels, total, pairs = targets.tolist(), x.sum() * 0, 0
    for i in range(len(x)):
        for j in range(i + 1, len(x)):
            if labels[i] != labels[j]:
                continue
            pairs += 1
            others = [k for k in range(len(x)) if labels[k] != labels[i]]
            pushes = [margin - distance(end, k) for end in (i, j) for k in others]
            if not pushes:
                continue
            push = torch.stack(pushes)
            push = push.exp().sum().log() if smooth else push.max()
            total = total + torch.maximum(distance(i, j) + push, torch.zeros(())) ** 2
    return total / (2 * max(pairs, 1))


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 8),
    classes=st.integers(1, 4),
    seed=st.integers(0, 999),
    margin=st.floats(-1, 3),
    smooth=st.booleans(),
)
def test_equals_the_loop(count: int, classes: int, seed: int, margin: float, smooth: bool) -> None:
    x, targets = make(count, classes, seed)
    found = lifted_structured_loss_func(x, targets, margin, smooth)
    expected = loop(x, targets, margin, smooth)
    same(found, expected, x, values=(1e-10, 1e-12), slopes=(1e-8, 1e-10))


DISTANCES = ["sqeuclidean", "cosine"]


def neighbors_loop(x: Tensor, targets: Tensor, temperature: float, distance: str) -> Tensor:
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
def test_neighbors_equals_the_loop(
    count: int, classes: int, seed: int, temperature: float, distance: Any
) -> None:
    x, targets = make(count, classes, seed)
    found = soft_nearest_neighbor_loss_func(x, targets, temperature, distance)
    expected = neighbors_loop(x, targets, temperature, distance)
    same(found, expected, x, values=(1e-8, 1e-10), slopes=(1e-6, 1e-9))


X, LABELS = torch.ones(3, 2), torch.zeros(3).long()
SHAPE, LABELLED = r"\(N, D\)", r"\(N, D\) and targets \(N,\)"


@pytest.mark.parametrize(
    ("loss", "given", "message"),
    [
        (contrastive_loss_func, (X, X[:2], LABELS > 0), r"\(N, D\), got \(3, 2\) and \(2, 2\)"),
        (contrastive_loss_func, (X, X, torch.ones(3, 1) > 0), r"same must be \(3,\)"),
        (contrastive_loss_func, (X, X, LABELS > 0, -0.1), "margin=-0.1"),
        (triplet_loss_func, (X[:2], X, X), SHAPE),
        (triplet_loss_func, (X, X, X[:, :1]), SHAPE),
        (triplet_loss_func, (X[0], X[0], X[0]), SHAPE),
        (triplet_loss_func, (X, X, X, math.nan), "margin=nan"),
        (lifted_structured_loss_func, (X[0], LABELS), LABELLED),
        (lifted_structured_loss_func, (X, LABELS[:2]), LABELLED),
        (lifted_structured_loss_func, (X, LABELS, math.inf), "margin=inf"),
        (soft_nearest_neighbor_loss_func, (X, LABELS[:, None]), LABELLED),
        (soft_nearest_neighbor_loss_func, (X, LABELS, 0.0), "temperature=0.0"),
        (soft_nearest_neighbor_loss_func, (X, LABELS, 1.0, "euclidean"), "'sqeuclidean' or"),
    ],
)
def test_refuses(loss: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(*given)
