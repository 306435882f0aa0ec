"""The hard negative loss against the paper's formula, one similarity at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import LOSSES
from solo_ext.losses.contrastive import (
    NegativeEstimator,
    debiased_loss_func,
    estimated_terms,
    hard_negative_loss_func,
    nt_xent_loss_func,
)


def make_views(batch: int, views: int = 2, *, seed: int = 0, noise: float = 0.7) -> list[Tensor]:
    """Returns fp64 views, similar row by row, of any scale."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(batch, 5, generator=generator, dtype=torch.float64)
    noises = torch.randn(views, batch, 5, generator=generator, dtype=torch.float64)
    scales = 0.2 + 5 * torch.rand(views, batch, 1, generator=generator, dtype=torch.float64)
    return [z.requires_grad_() for z in scales * (centres + noise * noises)]


def weighted(similar: list[Tensor], beta: float, detached: bool) -> Tensor:
    """Expectation of exp(s) under importance weights exp(beta s)."""
    weights = [(s.detach() if detached else s).mul(beta).exp() for s in similar]
    total = torch.stack([w * s.exp() for w, s in zip(weights, similar, strict=True)]).sum()
    return total / torch.stack(weights).sum()


def loop(
    views: list[Tensor], temperature: float, tau_plus: float, beta: float, detached: bool
) -> Tensor:
    """Eq. 4 of the paper: the first two views against each other, the others as samples."""
    images = [[F.normalize(view[i], dim=0) for view in views] for i in range(len(views[0]))]
    losses = []
    for i, own in enumerate(images):
        for v in (0, 1):
            anchor = own[v]
            negatives = [
                torch.dot(anchor, row) / temperature
                for j, other in enumerate(images)
                if j != i
                for row in other[:2]
            ]
            positive = torch.dot(anchor, own[1 - v]) / temperature
            samples = [positive, *(torch.dot(anchor, row) / temperature for row in own[2:])]
            hard = weighted(negatives, beta, detached)
            same = weighted(samples, beta, detached)
            estimate = (hard - tau_plus * same) / (1 - tau_plus)
            floor = math.exp(-1 / temperature)
            if estimate.item() < floor:
                estimate = torch.tensor(floor, dtype=torch.float64)
            losses.append(-(positive.exp() / (positive.exp() + len(negatives) * estimate)).log())
    return torch.stack(losses).mean()


def grads(loss: Tensor, views: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, views, materialize_grads=True))


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(2, 4),
    further=st.integers(0, 2),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3.0),
    tau_plus=st.sampled_from([0.0, 0.05, 0.1, 0.5]),
    beta=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    detached=st.booleans(),
)
def test_value_and_gradient_equal_the_loop(
    batch: int,
    further: int,
    seed: int,
    temperature: float,
    tau_plus: float,
    beta: float,
    detached: bool,
) -> None:
    views = make_views(batch, 2 + further, seed=seed)
    expected = loop(views, temperature, tau_plus, beta, detached)
    more = torch.stack(views[2:], 1) if further else None
    loss = hard_negative_loss_func(*views[:2], temperature, tau_plus, beta, detached, more)
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-11)
    for found, wanted in zip(grads(loss, views), grads(expected, views), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_defaults() -> None:
    views = make_views(6)
    expected = hard_negative_loss_func(*views, 0.5, 0.1, 1.0, False)
    assert torch.equal(hard_negative_loss_func(*views), expected)


def test_detached_weights_change_the_gradient_alone() -> None:
    views = make_views(4)
    flows, stops = (hard_negative_loss_func(*views, detach_weights=d) for d in (False, True))
    torch.testing.assert_close(flows, stops, rtol=1e-14, atol=0)
    assert (grads(flows, views)[0] - grads(stops, views)[0]).abs().max() > 1e-3


@settings(deadline=None, max_examples=20)
@given(
    batch=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.02, 5.0),
    tau_plus=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_without_concentration_it_is_the_debiased_loss(
    batch: int, seed: int, temperature: float, tau_plus: float
) -> None:
    views = make_views(batch, 3, seed=seed)
    more = views[2].unsqueeze(1)
    for further in (None, more):
        found = hard_negative_loss_func(
            *views[:2], temperature, tau_plus, 0.0, more_positives=further
        )
        expected = debiased_loss_func(*views[:2], temperature, tau_plus, further)
        assert torch.equal(found, expected)
    # And continuous there.
    near = hard_negative_loss_func(*views[:2], temperature, 0.0, 1e-9)
    torch.testing.assert_close(near, nt_xent_loss_func(*views[:2], temperature))


def test_without_both_it_is_nt_xent() -> None:
    views = make_views(5)
    found, expected = (
        hard_negative_loss_func(*views, 0.3, 0.0, 0.0),
        nt_xent_loss_func(*views, 0.3),
    )
    assert torch.equal(found, expected)
    for a, b in zip(grads(found, views), grads(expected, views), strict=True):
        assert torch.equal(a, b)


def test_all_weight_on_the_hardest() -> None:
    """A large beta leaves copies of the hardest negative."""
    views = make_views(4)
    rows = F.normalize(torch.cat(views), dim=1)
    logits = rows @ rows.T / 0.5
    same = torch.arange(4).repeat(2).unsqueeze(0) == torch.arange(4).repeat(2).unsqueeze(1)
    hardest = logits.masked_fill(same, -math.inf).amax(1)
    positive = logits.diagonal(4).repeat(2)
    expected = F.softplus(hardest + math.log(6) - positive).mean()
    found = hard_negative_loss_func(*views, 0.5, 0.0, 1e5)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("beta", [5.0, 50.0, 200.0])
@pytest.mark.parametrize("temperature", [0.05, 0.1, 0.5])
def test_single_precision_keeps_up(temperature: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(32, 16, generator=generator, dtype=torch.float64)
    exact = [
        (
            base + 1.5 * torch.randn(32, 16, generator=generator, dtype=torch.float64)
        ).requires_grad_()
        for _ in range(2)
    ]
    single = [z.detach().float().requires_grad_() for z in exact]
    expected, found = (
        hard_negative_loss_func(*views, temperature, 0.01, beta) for views in (exact, single)
    )
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=3e-4)
    for a, b in zip(grads(found, single), grads(expected, exact), strict=True):
        assert (a.double() - b).norm() / b.norm() < 5e-3


@pytest.mark.parametrize("detached", [False, True])
def test_floored_anchors_do_not_push_their_negatives(detached: bool) -> None:
    views = make_views(6, noise=0.05)
    terms = estimated_terms(views[0], views[1], 0.1, NegativeEstimator(0.9, 0.5, detached))
    assert terms.floored.item() == 1
    positive = F.cosine_similarity(*views) / 0.1
    alone = F.softplus(math.log(10) - 1 / 0.1 - positive).mean()
    for a, b in zip(grads(terms.loss, views), grads(alone, views), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("beta", [-0.1, math.inf, math.nan])
def test_refuses_beta(beta: float) -> None:
    with pytest.raises(ValueError, match=f"beta={beta}: must be 0 or more"):
        hard_negative_loss_func(*make_views(3), 0.5, 0.1, beta)


@pytest.mark.parametrize("tau_plus", [-0.1, 1.0, math.nan])
def test_refuses_tau_plus(tau_plus: float) -> None:
    with pytest.raises(ValueError, match=rf"tau_plus={tau_plus}: must lie in \[0, 1\)"):
        hard_negative_loss_func(*make_views(3), 0.5, tau_plus)


@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 5), (3, 1, 4)])
def test_refuses_shapes_of_further_positives(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"more_positives must be \(3, M - 1, 5\)"):
        hard_negative_loss_func(*make_views(3), more_positives=torch.ones(shape))


def test_is_registered() -> None:
    entry = LOSSES["hard_negative_loss_func"]
    assert entry.target is hard_negative_loss_func
    assert entry.arxiv == "2010.04592"
