"""Distances of all pairs, and their gradient where it is hard to get right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from solo_ext.losses.metric import pairwise_distances, row_distances


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


def test_gradcheck() -> None:
    x, y = rows(4).requires_grad_(), rows(6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(pairwise_distances, (x, y))
    assert torch.autograd.gradcheck(lambda a: pairwise_distances(a, y.detach()), x)
    assert torch.autograd.gradcheck(lambda b: pairwise_distances(x.detach(), b), y)
    assert torch.autograd.gradcheck(lambda a: pairwise_distances(a, a).square(), x)
    assert torch.autograd.gradcheck(row_distances, (x, y[:4]))


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


def test_second_derivative_is_refused() -> None:
    x = rows(3).requires_grad_()
    (first,) = torch.autograd.grad(pairwise_distances(x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
