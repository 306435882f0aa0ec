"""The losses of given pairs and triplets against their formulas, one sample at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import LOSSES, contrastive_loss_func, triplet_loss_func

DRAWN = settings(deadline=None, max_examples=30)


def make_rows(count: int, seed: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(number, count, 4, generator=generator, dtype=torch.float64)
    return [z.requires_grad_() for z in rows]


def close(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Compares values and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    one, two = torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


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


def test_triplet_without_squares_is_that_of_torch() -> None:
    """Which by default adds 1e-6 to each difference."""
    a, p, n = make_rows(8, 0, 3)
    found = triplet_loss_func(a, p, n, 0.7, squared=False)
    expected = F.triplet_margin_loss(a, p, n, margin=0.7, eps=0)
    torch.testing.assert_close(found, expected)


def test_gradcheck() -> None:
    x, y, z = make_rows(5, 0, 3)
    same = torch.tensor([True, False, True, False, False])
    for margin in (1.0, 4.0):
        assert torch.autograd.gradcheck(
            lambda a, b, m=margin: contrastive_loss_func(a, b, same, m), (x, y)
        )
        for squared in (True, False):
            assert torch.autograd.gradcheck(
                lambda a, b, c, m=margin, s=squared: triplet_loss_func(a, b, c, m, s), (x, y, z)
            )


def test_satisfied_terms_have_no_gradient() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    far = torch.tensor([[2.0, 0, 0], [0, 0.5, 0]])
    contrastive_loss_func(x, far, torch.tensor([False, False]), 1.0).backward()
    assert x.grad is not None
    assert (x.grad != 0).any(1).tolist() == [False, True]
    # The one at distance 2 is far enough; 0.25 - 1 is not.
    (gradient,) = torch.autograd.grad(triplet_loss_func(x, torch.zeros(2, 3), far, 1.0), x)
    assert (gradient != 0).any(1).tolist() == [False, True]


def test_collapsed_triplets_stay_at_the_margin() -> None:
    rows = [torch.full((3, 4), 2.0, requires_grad=True) for _ in range(3)]
    for squared in (True, False):
        loss = triplet_loss_func(*rows, 0.3, squared)
        assert loss.item() == pytest.approx(0.3)
        assert not any(g.any() for g in torch.autograd.grad(loss, rows))


def test_defaults() -> None:
    a, b, c = make_rows(6, 0, 3)
    same = torch.arange(6) < 3
    assert torch.equal(contrastive_loss_func(a, b, same), contrastive_loss_func(a, b, same, 1.0))
    assert torch.equal(triplet_loss_func(a, b, c), triplet_loss_func(a, b, c, 1.0, True))


@pytest.mark.parametrize("margin", [-0.1, math.nan])
def test_refuses_margin(margin: float) -> None:
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="margin"):
        contrastive_loss_func(x, x, torch.ones(3) > 0, margin)
    with pytest.raises(ValueError, match="margin"):
        triplet_loss_func(x, x, x, margin)


def test_refuses_shapes() -> None:
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"\(N, D\), got \(3, 2\) and \(2, 2\)"):
        contrastive_loss_func(x, x[:2], torch.ones(3) > 0)
    with pytest.raises(ValueError, match=r"same must be \(3,\)"):
        contrastive_loss_func(x, x, torch.ones(3, 1) > 0)
    for broken in ((x[:2], x, x), (x, x[:2], x), (x, x, x[:, :1]), (x[0], x[0], x[0])):
        with pytest.raises(ValueError, match=r"\(N, D\)"):
            triplet_loss_func(*broken)


def test_are_registered() -> None:
    assert LOSSES["contrastive_loss_func"].target is contrastive_loss_func
    assert LOSSES["triplet_loss_func"].target is triplet_loss_func
    assert LOSSES["triplet_loss_func"].arxiv == "1503.03832"
