"""N-pair, CLIP, CPC and NCE against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import (
    bilinear_info_nce_loss_func,
    clip_loss_func,
    n_pair_loss_func,
    nce_loss_func,
)
from tests.losses.conftest import same

DRAWN = settings(deadline=None, max_examples=30)


def make(count: int, seed: int, *dims: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, dim, generator=generator, dtype=torch.float64).requires_grad_()
        for dim in dims
    ]


def cross_entropy(score: Callable[[int, int], Tensor], count: int) -> Tensor:
    """``-log(exp(s_ii) / sum_j exp(s_ij))``, mean over i."""
    terms = []
    for i in range(count):
        mass = sum(score(i, j).exp() for j in range(count))
        terms.append(-(score(i, i).exp() / mass).log())
    return torch.stack(terms).mean()


close = partial(same, values=(1e-9, 1e-12), slopes=(1e-7, 1e-10))


@DRAWN
@given(count=st.integers(1, 6), seed=st.integers(0, 999), l2_reg=st.sampled_from([0.0, 0.02, 1.5]))
def test_n_pair_equals_the_loop(count: int, seed: int, l2_reg: float) -> None:
    a, p = make(count, seed, 4, 4)
    terms = []
    for i in range(count):
        others = [(a[i] @ p[j] - a[i] @ p[i]).exp() for j in range(count) if j != i]
        term = (1 + torch.stack([*others, 0 * a[i] @ p[i]]).sum()).log()
        terms.append(term + l2_reg / 4 * (a[i] @ a[i] + p[i] @ p[i]))
    close(n_pair_loss_func(a, p, l2_reg), torch.stack(terms).mean(), [a, p])


@DRAWN
@given(count=st.integers(1, 6), seed=st.integers(0, 999), scale=st.floats(0.1, 50))
def test_clip_equals_the_loop(count: int, seed: int, scale: float) -> None:
    image, text = make(count, seed, 4, 4)
    learned = torch.tensor(scale, dtype=torch.float64, requires_grad=True)

    def score(i: int, j: int) -> Tensor:
        return learned * F.cosine_similarity(image[i], text[j], dim=0)

    rows = cross_entropy(score, count)
    columns = cross_entropy(lambda i, j: score(j, i), count)
    inputs = [image, text, learned]
    close(clip_loss_func(image, text, learned), (rows + columns) / 2, inputs)
    assert torch.equal(clip_loss_func(image, text, scale), clip_loss_func(image, text, learned))


@DRAWN
@given(count=st.integers(1, 6), seed=st.integers(0, 999), temperature=st.floats(0.3, 4))
def test_cpc_equals_the_loop(count: int, seed: int, temperature: float) -> None:
    z, c = make(count, seed, 3, 5)
    weight = make(3, seed + 1, 5)[0]

    def score(i: int, j: int) -> Tensor:
        products = [
            z[i, a] * weight[a, b] * c[j, b] / temperature for a in range(3) for b in range(5)
        ]
        return torch.stack(products).sum()

    found = bilinear_info_nce_loss_func(z, c, weight, temperature)
    close(found, cross_entropy(score, count), [z, c, weight])


@pytest.mark.parametrize("shared", [(), ("query",), ("context",)])
def test_cpc_has_a_matrix_for_each_step(shared: tuple[str, ...]) -> None:
    """The mean over the steps and queries of a loop over Eq. 4, step by step."""
    generator = torch.Generator().manual_seed(0)
    steps, count = 3, 4

    def rows(name: str, width: int) -> Tensor:
        shape = (count, width) if name in shared else (steps, count, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    z, c = rows("query", 2), rows("context", 3)
    weights = torch.randn(steps, 2, 3, generator=generator, dtype=torch.float64).requires_grad_()
    terms = []
    for k in range(steps):
        of_z, of_c = (x if x.ndim == 2 else x[k] for x in (z, c))
        for i in range(count):
            f = [(of_z[i] @ weights[k] @ of_c[j] / 0.7).exp() for j in range(count)]
            terms.append(-(f[i] / sum(f)).log())
    inputs, expected = [z, c, weights], torch.stack(terms).mean()
    found = bilinear_info_nce_loss_func(z, c, weights, 0.7)
    same(found, expected, inputs, values=(1e-12, 0), slopes=(1e-9, 1e-12))
    assert torch.autograd.gradcheck(lambda *x: bilinear_info_nce_loss_func(*x, 0.7), inputs)


def test_large_products_do_not_overflow() -> None:
    a, b = (z.detach().float().requires_grad_() for z in make(5, 0, 4, 4))
    loss = n_pair_loss_func(1e4 * a, 1e4 * b)
    loss.backward()
    products = 1e8 * a @ b.T
    expected = (products.amax(1) - products.diagonal()).mean()
    torch.testing.assert_close(loss, expected)
    assert a.grad is not None
    assert a.grad.isfinite().all()


def nce_make(count: int, noise: int | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count,) if noise is None else (count, noise)
    data = torch.randn(count, generator=generator, dtype=torch.float64)
    other = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (3 * data).requires_grad_(), (3 * other).requires_grad_()


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 5), noise=st.none() | st.integers(0, 4), seed=st.integers(0, 999))
def test_equals_the_loop(count: int, noise: int | None, seed: int) -> None:
    data, other = nce_make(count, noise, seed)
    total = data.new_zeros(())
    for i in range(count):
        total = total - (1 / (1 + (-data[i]).exp())).log()
        for logit in other[i].reshape(-1):
            total = total - (1 - 1 / (1 + (-logit).exp())).log()
    # Without noise samples the loop's sum does not reach them.
    expected = total / count + 0 * other.sum()
    found = nce_loss_func(data, other)
    same(found, expected, (data, other), values=(1e-10, 1e-12), slopes=(1e-8, 1e-11))


@pytest.mark.parametrize("size", [25.0, 1e4, 1e30])
def test_large_logits(size: float) -> None:
    """A confident error costs what the logit says, a confident success nothing."""
    data = torch.tensor([size, -size], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([-size, size], dtype=torch.float64, requires_grad=True)
    loss = nce_loss_func(data, noise)
    slack = 2 * math.log1p(math.exp(-size))
    assert loss.item() == pytest.approx(size + slack, rel=1e-15)
    gradients = torch.cat(torch.autograd.grad(loss, (data, noise)))
    expected = torch.tensor([0, -0.5, 0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)


X = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("loss", "given", "message"),
    [
        (n_pair_loss_func, (X, X[:2]), r"\(N, D\)"),
        (n_pair_loss_func, (X, X, -1.0), "l2_reg=-1.0"),
        (clip_loss_func, (X, X[:, :1], 1.0), r"\(N, D\)"),
        (clip_loss_func, (X, X, torch.ones(3)), r"logit_scale has the shape \(3,\)"),
        (clip_loss_func, (X, X, 0.0), "logit_scale=0.0"),
        (bilinear_info_nce_loss_func, (X, X[:2], torch.eye(2)), r"query must be \(N, D1\)"),
        (bilinear_info_nce_loss_func, (X, X, torch.eye(4)), r"weight must be \(2, 2\)"),
        (bilinear_info_nce_loss_func, (X, X, torch.eye(2), math.nan), "temperature=nan"),
        (bilinear_info_nce_loss_func, (X[None], X, torch.eye(2)), r"the steps of a weight"),
        (bilinear_info_nce_loss_func, (X, X, torch.eye(2)[None, None]), r"weight must be \(2, 2\)"),
        (nce_loss_func, (X, X), r"data_logits must be \(N,\)"),
        (nce_loss_func, (X[:, 0], X[:2]), r"noise_logits must be \(3,\) or \(3, K\)"),
        (nce_loss_func, (X[:, 0], torch.ones(())), r"noise_logits must be \(3,\) or \(3, K\)"),
    ],
)
def test_refuses(loss: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(*given)
