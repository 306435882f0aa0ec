"""Prototypes, the prior over them, and Sinkhorn-Knopp against its formula in the log domain."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from solo_ext.memory import PrototypePrior, Prototypes, sinkhorn


def probabilities(seed: int, rows: int = 6, width: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, width, generator=generator)).softmax(1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.999, 1.0])
def test_is_the_running_mean_times_k(momentum: float) -> None:
    prior, expected = PrototypePrior(5, momentum), [1.0] * 5
    for seed, rows in enumerate((6, 2, 9)):
        probs = probabilities(seed, rows)
        for k in range(5):
            mean = sum(float(p[k]) for p in probs) / rows
            expected[k] = momentum * expected[k] + (1 - momentum) * 5 * mean
        prior.update_(probs)
        torch.testing.assert_close(prior.value, torch.tensor(expected))


@pytest.mark.parametrize("momentum", [-0.1, 1.1, float("nan")])
def test_momentum_is_a_share(momentum: float) -> None:
    with pytest.raises(ValueError, match=rf"momentum={momentum}: must be in \[0, 1\]"):
        PrototypePrior(5, momentum)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (4, 1), (2, 4, 5)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    prior = PrototypePrior(5)
    for take in (prior.peek, prior.update_):
        with pytest.raises(ValueError, match=r"must be \(N, 5\), got " + re.escape(str(shape))):
            take(torch.rand(shape))
    assert torch.equal(prior.value, torch.ones(5))


def test_peek_changes_nothing_and_commit_takes_it() -> None:
    prior, probs = PrototypePrior(5), probabilities(0)
    held = prior.value
    seen = prior.peek(probs)
    assert torch.equal(prior.value, torch.ones(5))
    prior.commit_(seen)
    assert prior.value is held
    assert torch.equal(held, seen)
    assert not torch.equal(seen, torch.ones(5))


def test_is_a_constant() -> None:
    prior, logits = PrototypePrior(5), torch.randn(4, 5, requires_grad=True)
    assert not prior.peek(logits.softmax(1)).requires_grad
    prior.update_(logits.softmax(1))
    assert not prior.value.requires_grad
    assert not list(prior.parameters())


def test_checkpoint_brings_it_back() -> None:
    prior, restored = PrototypePrior(5), PrototypePrior(5)
    prior.update_(probabilities(0))
    restored.load_state_dict(prior.state_dict())
    assert torch.equal(restored.value, prior.value)
    assert torch.equal(restored.peek(probabilities(1)), prior.peek(probabilities(1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stays_in_single_precision(dtype: torch.dtype) -> None:
    prior, other = PrototypePrior(5), nn.Linear(2, 2)
    prior.update_(probabilities(0))
    before = prior.value.clone()
    nn.ModuleList((prior, other)).to(dtype)
    assert other.weight.dtype == dtype
    assert prior.value.dtype == torch.float32
    assert torch.equal(prior.value, before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = prior.peek(probabilities(1).to(dtype))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(), torch.tensor(5.0), rtol=2e-3, atol=0)


def test_runs_without_looking_at_values() -> None:
    prior, found = PrototypePrior(5).to("meta"), sinkhorn(torch.empty(3, 5, device="meta"), 0.01, 5)
    assert found.is_meta
    assert found.shape == (3, 5)
    prior.update_(found)
    assert prior.value.is_meta


def cosines(rows: int, prototypes: int, seed: int = 0, dim: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, w = (
        F.normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64), dim=1)
        for n in (rows, prototypes)
    )
    return x @ w.T


def in_the_log_domain(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """The formula, safe and slow: prototypes first, samples last."""
    log = scores.double() / epsilon
    for _ in range(iterations):
        log = log - log.logsumexp(0, keepdim=True)
        log = log - log.logsumexp(1, keepdim=True)
    return log.exp()


EPSILONS = pytest.mark.parametrize("epsilon", [1.0, 0.05, 0.025, 0.024, 0.01, 1e-3])


@EPSILONS
@pytest.mark.parametrize("iterations", [1, 3, 4, 20])
@pytest.mark.parametrize(("rows", "prototypes"), [(13, 40), (40, 7), (1, 5), (6, 1)])
@pytest.mark.parametrize("unit", [False, True])
def test_equals_the_log_domain(
    epsilon: float, iterations: int, rows: int, prototypes: int, unit: bool
) -> None:
    scores = cosines(rows, prototypes)
    expected = in_the_log_domain(scores, epsilon, iterations)
    found = sinkhorn(scores, epsilon, iterations, unit=unit)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    # What rounding the scores alone makes of it.
    rounded = in_the_log_domain(scores.float(), epsilon, iterations)
    found = sinkhorn(scores.float(), epsilon, iterations, unit=unit)
    torch.testing.assert_close(found.double(), rounded, rtol=1e-3, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e3, 1e5]),
    offset=st.sampled_from([0.0, -1e4, 1e4]),
    iterations=st.integers(1, 9),
)
def test_any_scores_are_safe(seed: int, scale: float, offset: float, iterations: int) -> None:
    """Of any range and offset, also where some rows or columns are far above all others."""
    scores = scale * cosines(9, 17, seed) + offset
    scores[seed % 9] += scale
    scores[:, seed % 17] -= 3 * scale
    expected = in_the_log_domain(scores, 1.0, iterations)
    found = sinkhorn(scores, 1.0, iterations)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    single = sinkhorn(scores.float(), 1.0, iterations)
    assert single.isfinite().all()
    torch.testing.assert_close(single.sum(1), torch.ones(9))


def test_many_iterations_without_a_balance_are_safe() -> None:
    """All samples but one want one prototype, whose factor falls from iteration to iteration."""
    scores = torch.full((40, 3), -500.0)
    scores[:, 0] = scores[0] = 0
    for iterations in (3, 150, 400):
        expected = in_the_log_domain(scores, 1.0, iterations)
        found = sinkhorn(scores, 1.0, iterations)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    scores = cosines(8, 20).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sinkhorn(scores, 0.025)
    assert found.dtype == torch.float32
    assert torch.equal(found, sinkhorn(scores.float(), 0.025))


def test_is_a_constant_and_leaves_the_scores() -> None:
    scores = cosines(8, 5).requires_grad_()
    before = scores.detach().clone()
    assert not sinkhorn(scores).requires_grad
    assert torch.equal(scores, before)
    torch.testing.assert_close(sinkhorn(scores.T.contiguous().T), sinkhorn(scores))


def test_sinkhorn_refuses() -> None:
    scores = cosines(3, 4)
    with pytest.raises(ValueError, match=r"epsilon=0: must be above 0"):
        sinkhorn(scores, 0)
    with pytest.raises(ValueError, match=r"iterations=0: must be 1 or more"):
        sinkhorn(scores, iterations=0)
    with pytest.raises(ValueError, match=r"scores must be \(N, K\), got \(3,\)"):
        sinkhorn(scores[:, 0])


def test_prototypes_start_as_random_directions() -> None:
    torch.manual_seed(0)
    weight = Prototypes(200, 8).weight
    assert weight.requires_grad
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(200))
    assert weight.detach().T.cov().diagonal().min() > 0.05
    torch.manual_seed(0)
    assert torch.equal(Prototypes(200, 8).weight, weight)


def test_normalize_of_prototypes_is_in_place() -> None:
    prototypes = Prototypes(6, 4)
    held = prototypes.weight
    optimiser = torch.optim.SGD(prototypes.parameters(), lr=1.0)
    prototypes(F.normalize(torch.randn(3, 4), dim=1)).square().sum().backward()
    optimiser.step()
    assert (held.norm(dim=1) - 1).abs().max() > 1e-3
    moved = held.detach().clone()
    prototypes.normalize_()
    assert prototypes.weight is held
    torch.testing.assert_close(held.detach(), F.normalize(moved, dim=1))


def test_prototypes_from_rows_are_copies_and_draw_nothing() -> None:
    rows = 3 * torch.randn(5, 4)
    before, generator = rows.clone(), torch.get_rng_state()
    prototypes = Prototypes.from_rows(rows)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(prototypes.weight.detach(), F.normalize(rows, dim=1))
    assert prototypes.weight.requires_grad
    with torch.no_grad():
        prototypes.weight.zero_()
    assert torch.equal(rows, before)
