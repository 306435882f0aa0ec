"""The lifted structured loss against the paper's formula, one pair at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import LOSSES, lifted_structured_loss_func


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
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("smooth", [True, False])
def test_gradcheck(smooth: bool) -> None:
    x, targets = make(7, 3, 0)
    assert torch.autograd.gradcheck(
        lambda rows: lifted_structured_loss_func(rows, targets, 1.0, smooth), x
    )


@pytest.mark.parametrize("margin", [0.2, 1.0])
def test_smooth_form_is_that_of_pytorch_metric_learning(margin: float) -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    x, targets = make(12, 4, 1)
    theirs = losses.LiftedStructureLoss(
        neg_margin=margin,
        pos_margin=0,
        distance=distances.LpDistance(normalize_embeddings=False),
    )
    found, expected = lifted_structured_loss_func(x, targets, margin), theirs(x, targets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


def test_smooth_form_bounds_the_other() -> None:
    x, targets = make(9, 3, 2)
    smooth, hard = (lifted_structured_loss_func(x, targets, 1.0, s) for s in (True, False))
    assert smooth > hard > 0


def test_order_and_place_do_not_matter() -> None:
    x, targets = make(8, 3, 3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    found = lifted_structured_loss_func(x[order] + 5, 10 - targets[order])
    torch.testing.assert_close(found, lifted_structured_loss_func(x, targets))


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize(
    "targets", [[0, 0, 0, 0], [0, 1, 2, 3]], ids=["no negative", "no positive"]
)
def test_zero_on_the_graph(targets: list[int], smooth: bool) -> None:
    x, _ = make(4, 1, 0)
    loss = lifted_structured_loss_func(x, torch.tensor(targets), 1.0, smooth)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, x)[0].any()


def test_defaults() -> None:
    x, targets = make(8, 3, 4)
    expected = lifted_structured_loss_func(x, targets, 1.0, True)
    assert torch.equal(lifted_structured_loss_func(x, targets), expected)


def test_refuses_shapes() -> None:
    for x, targets in (
        (torch.ones(3), torch.zeros(3).long()),
        (torch.ones(3, 2), torch.zeros(2).long()),
        (torch.ones(3, 2), torch.zeros(3, 1).long()),
    ):
        with pytest.raises(ValueError, match=r"\(N, D\) and targets \(N,\)"):
            lifted_structured_loss_func(x, targets)


@pytest.mark.parametrize("margin", [math.nan, math.inf, -math.inf])
def test_refuses_margin(margin: float) -> None:
    with pytest.raises(ValueError, match=f"margin={margin}"):
        lifted_structured_loss_func(*make(3, 2, 0), margin)


def test_is_registered() -> None:
    entry = LOSSES["lifted_structured_loss_func"]
    assert entry.target is lifted_structured_loss_func
    assert entry.arxiv == "1511.06452"
