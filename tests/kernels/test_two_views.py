"""The contrast of two views at once equals that in blocks, wherever it is taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.kernels.in_batch import two_view_contrast, two_view_fits
from solo_ext.losses import debiased_loss_func, hard_negative_loss_func, nt_xent_loss_func
from solo_ext.losses.contrastive import (
    NegativeEstimator,
    batch_of_views,
    contrastive,
    two_view_terms,
)

PeakBytes = Callable[[Callable[[], Any]], int]
Launches = Callable[[Callable[[], Any]], int]


def views(images: int, dim: int = 8, seed: int = 0, noise: float = 0.7) -> list[Tensor]:
    """Two views, alike row by row, of any scale."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = (1 + normal(2, images, 1).abs()) * (normal(images, dim) + noise * normal(2, images, dim))
    return [z.requires_grad_() for z in made]


def check(given: list[Tensor], temperature: float, estimator: NegativeEstimator, tol: float) -> Any:
    """All terms, and the gradients."""
    assert two_view_fits(given[0], 1 / temperature, estimator.beta)
    found, batch = two_view_terms(*given, temperature, estimator), batch_of_views(given)
    expected = contrastive(**batch._asdict(), estimator=estimator, temperature=temperature)
    for name in ("loss", "losses", "floored", "hardness", "mined", "mixed"):
        one, two = getattr(found, name), getattr(expected, name)
        assert one.requires_grad == (name == "loss")
        torch.testing.assert_close(one, two, rtol=tol, atol=tol, equal_nan=True, msg=name)
    ours, theirs = (torch.cat(torch.autograd.grad(t.loss, given)) for t in (found, expected))
    # Row by row: rows without a direction have gradients far larger than the others.
    assert ((ours - theirs).norm(dim=1) <= 10 * tol * theirs.norm(dim=1) + 1e-3 * tol).all()
    return found


@settings(deadline=None, max_examples=100)
@drawn(
    images=st.integers(2, 9),
    dim=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 5.0),
    tau_plus=st.just(0.0) | st.floats(1e-3, 0.95),
    beta=st.sampled_from([0.0, 1.0]) | st.floats(0.01, 4.0),
    detach=st.booleans(),
)
def test_equals_the_blocks(
    images: int,
    dim: int,
    seed: int,
    temperature: float,
    tau_plus: float,
    beta: float,
    detach: bool,
) -> None:
    check(views(images, dim, seed), temperature, NegativeEstimator(tau_plus, beta, detach), 1e-9)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.5])
def test_single_precision_on_the_floor_and_off_it(beta: float) -> None:
    single = [z.detach().float().requires_grad_() for z in views(24, 16, noise=0.3)]
    for tau_plus, temperature in ((0.0, 0.2), (0.1, 0.5), (0.6, 0.3)):
        found = check(single, temperature, NegativeEstimator(tau_plus, beta), 2e-5)
    assert found.floored > 0


def test_rows_without_a_direction() -> None:
    """Zero and next to it, on either side of where lengths begin to count."""
    given = views(6, 5)
    with torch.no_grad():
        given[0][0] = 0
        given[1][0] = 0
        for row, length in ((1, 1e-30), (2, 0.5e-12), (3, 2e-12)):
            given[0][row] *= length / given[0][row].norm()
    check(given, 0.5, NegativeEstimator(0.1, 1.0), 1e-9)


def test_strided_views_of_which_one_learns() -> None:
    wide = torch.randn(8, 20, dtype=torch.float64)
    z1, z2 = wide[::2, 3:8].requires_grad_(), torch.randn(5, 4, dtype=torch.float64).T
    loss = two_view_terms(z1, z2, 0.5).loss
    batch = batch_of_views((z1, z2))
    expected = contrastive(**batch._asdict(), temperature=0.5).loss
    torch.testing.assert_close(*(torch.autograd.grad(x, z1)[0] for x in (loss, expected)))


def test_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only there: neither for one image, large batches, low temperatures nor many ranks."""
    taken: list[bool] = []

    def noting(*args: Any) -> Any:
        taken.append(True)
        return two_view_contrast(*args)

    # The package's attribute of the module's name is the function.
    module = sys.modules["solo_ext.losses.contrastive"]
    monkeypatch.setattr(module, "two_view_contrast", noting)

    def takes(images: int, temperature: float, beta: float = 0.0) -> bool:
        taken.clear()
        rows = torch.randn(2, images, 3)
        assert two_view_terms(*rows, temperature, NegativeEstimator(0.1, beta)).loss.isfinite()
        return bool(taken)

    assert takes(2, 0.5)
    assert not takes(1, 0.5)
    assert takes(1024, 0.5)
    assert not takes(1025, 0.5)
    assert takes(2, 1 / 29.9)
    assert not takes(2, 1 / 30.1)
    assert takes(2, 0.1, 1.9)
    assert not takes(2, 0.1, 2.1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "gather_with_gradient", lambda x: x)
    assert not takes(2, 0.5)


@pytest.mark.parametrize("loss", [nt_xent_loss_func, debiased_loss_func, hard_negative_loss_func])
def test_few_launches_and_matrices(launches: Launches, peak_bytes: PeakBytes, loss: Any) -> None:
    """Loss, gradient and what is logged; the form in blocks takes about twice as many."""
    given = [z.detach().float().requires_grad_() for z in views(256, 128)]
    assert launches(lambda: torch.autograd.grad(loss(*given), given)) <= 60
    matrices = 3 if loss is hard_negative_loss_func else 2
    assert peak_bytes(lambda: loss(*given).backward()) < (matrices + 0.35) * 4 * 512**2
