"""The contrast of two views in one block against that of any views in any blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.kernels import two_view_contrast, two_view_fits
from solo_ext.losses import debiased_loss_func, hard_negative_loss_func, nt_xent_loss_func
from solo_ext.losses.contrastive import (
    PLAIN,
    ContrastiveTerms,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    two_view_terms,
)

PeakBytes = Callable[[Callable[[], Any]], int]
Launches = Callable[[Callable[[], Any]], int]
ESTIMATORS = [
    NegativeEstimator(tau_plus, beta, detach)
    for tau_plus in (0.0, 0.1, 0.6)
    for beta, detach in ((0.0, False), (0.5, False), (1.0, False), (2.5, False), (1.0, True))
]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "NT-Xent": nt_xent_loss_func,
    "debiased": debiased_loss_func,
    "hard": hard_negative_loss_func,
}
"""Of the authors' settings."""


def views(
    images: int, dim: int = 8, seed: int = 0, noise: float = 0.7, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Two views, alike row by row, of any scale."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = (1 + normal(2, images, 1).abs()) * (normal(images, dim) + noise * normal(2, images, dim))
    return [z.to(dtype).requires_grad_() for z in made]


def in_blocks(z1: Tensor, z2: Tensor, temperature: float, estimator: NegativeEstimator) -> Any:
    batch = batch_of_views((z1, z2))
    return contrastive(**batch._asdict(), estimator=estimator, temperature=temperature)


def agree(
    found: ContrastiveTerms, expected: ContrastiveTerms, given: list[Tensor], relative: float
) -> None:
    """In all terms and in the gradients."""
    for name in ("loss", "losses", "floored", "hardness"):
        one, two = getattr(found, name), getattr(expected, name)
        assert one.shape == two.shape
        assert one.requires_grad == (name == "loss")
        torch.testing.assert_close(one, two, rtol=relative, atol=relative, msg=name)
    assert found.mined.isnan()
    assert found.mixed.isnan()
    ours, theirs = (
        torch.cat(torch.autograd.grad(terms.loss, given)) for terms in (found, expected)
    )
    assert (ours - theirs).norm() <= relative * theirs.norm() + 1e-14


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("temperature", [0.04, 0.1, 0.5, 2.0])
@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
def test_equals_the_other_form(
    estimator: NegativeEstimator, temperature: float, dtype: torch.dtype, relative: float
) -> None:
    """Whichever is taken; where it is the new one it is another sum, but for the rounding."""
    given = views(24, 16, noise=0.3 if estimator.tau_plus > 0.5 else 1.5, dtype=dtype)
    found = two_view_terms(*given, temperature, estimator)
    expected = in_blocks(*given, temperature, estimator)
    # The other form's softplus is its argument from 20 on, and off by exp(-20) there.
    agree(found, expected, given, max(relative, 2e-9 if temperature < 0.1 else 0))
    if estimator.tau_plus > 0.5 and temperature < 1:
        assert found.floored > 0


@settings(deadline=None, max_examples=60)
@given(
    images=st.integers(2, 9),
    dim=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 5.0),
    tau_plus=st.just(0.0) | st.floats(1e-3, 0.95),
    beta=st.sampled_from([0.0, 1.0]) | st.floats(0.01, 4.0),
    detach=st.booleans(),
)
def test_equals_the_other_form_anywhere(
    images: int,
    dim: int,
    seed: int,
    temperature: float,
    tau_plus: float,
    beta: float,
    detach: bool,
) -> None:
    given, estimator = views(images, dim, seed), NegativeEstimator(tau_plus, beta, detach)
    assert two_view_fits(given[0], 1 / temperature, beta)
    found = two_view_terms(*given, temperature, estimator)
    agree(found, in_blocks(*given, temperature, estimator), given, 1e-9)


def test_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only there: neither for one image, large batches, low temperatures nor many ranks."""
    taken: list[bool] = []

    def noting(*args: Any) -> Any:
        taken.append(True)
        return two_view_contrast(*args)

    monkeypatch.setattr("solo_ext.losses.two_views.two_view_contrast", noting)

    def takes(images: int, temperature: float, beta: float = 0.0, dtype: Any = None) -> bool:
        taken.clear()
        rows = torch.randn(2, images, 3, dtype=dtype)
        assert two_view_terms(*rows, temperature, NegativeEstimator(0.1, beta)).loss.isfinite()
        return bool(taken)

    assert takes(2, 0.5)
    assert not takes(1, 0.5)
    assert takes(512, 0.5)
    assert not takes(513, 0.5)
    assert not takes(512, 0.5, dtype=torch.float64), "twice the bytes"
    assert takes(2, 1 / 29.9)
    assert not takes(2, 1 / 30.1)
    assert takes(2, 0.1, 1.9)
    assert not takes(2, 0.1, 2.1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr("solo_ext.losses.two_views._in_blocks", in_blocks)
    monkeypatch.setattr(distributed, "gather_with_gradient", lambda x: x)
    assert not takes(2, 0.5)


@pytest.mark.parametrize("name", LOSSES)
def test_few_launches(launches: Launches, name: str) -> None:
    """Loss and gradient; the form in blocks takes about twice as many."""
    given = views(256, 128, dtype=torch.float32)
    most = {"NT-Xent": 34, "debiased": 39, "hard": 50}[name]
    assert launches(lambda: torch.autograd.grad(LOSSES[name](*given), given)) <= most


@pytest.mark.parametrize(
    "estimator", [PLAIN, NegativeEstimator(0.1), NegativeEstimator(0.1, 1.0)], ids=str
)
def test_few_launches_with_all_terms(launches: Launches, estimator: NegativeEstimator) -> None:
    given = views(256, 128, dtype=torch.float32)

    def step() -> None:
        torch.autograd.grad(two_view_terms(*given, 0.5, estimator).loss, given)

    assert launches(step) <= 60


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_memory_is_two_matrices(peak_bytes: PeakBytes, beta: float) -> None:
    """Three with powers of their own; and little beside them."""
    given = views(256, 128, dtype=torch.float32)
    matrix, estimator = 4 * 512**2, NegativeEstimator(0.1, beta)
    peak = peak_bytes(lambda: two_view_terms(*given, 0.5, estimator).loss.backward())
    matrices = 3 if beta == 0.5 else 2
    assert matrices * matrix <= peak < (matrices + 0.35) * matrix


@pytest.mark.parametrize("tau_plus", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_gradcheck(tau_plus: float, beta: float, temperature: float) -> None:
    given = views(3, 3)
    assert torch.autograd.gradcheck(
        lambda a, b: two_view_contrast(a, b, 1 / temperature, tau_plus, beta).loss, given
    )


def test_rows_without_a_direction() -> None:
    """Zero and next to it, on either side of where lengths begin to count."""
    given = views(6, 5)
    with torch.no_grad():
        given[0][0] = 0
        given[1][0] = 0
        for row, length in ((1, 1e-30), (2, 0.5e-12), (3, 2e-12)):
            given[0][row] *= length / given[0][row].norm()
    for estimator in ESTIMATORS:
        found = two_view_terms(*given, 0.5, estimator)
        expected = in_blocks(*given, 0.5, estimator)
        ours, theirs = (torch.autograd.grad(terms.loss, given) for terms in (found, expected))
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
        for one, two in zip(ours, theirs, strict=True):
            # Row by row: those of the shortest are a million million times the others.
            error = (one - two).norm(dim=1) / two.norm(dim=1)
            assert error.max() < 1e-9


@pytest.mark.parametrize("learns", [0, 1])
def test_gradient_of_one_view_alone(learns: int) -> None:
    given = views(5)
    (expected,) = torch.autograd.grad(in_blocks(*given, 0.5, PLAIN).loss, given[learns])
    given[1 - learns].requires_grad_(False)
    loss = two_view_terms(*given, 0.5).loss
    (found,) = torch.autograd.grad(loss, given[learns])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    loss = two_view_terms(*given, 0.5).loss
    loss.backward()
    assert given[1 - learns].grad is None


def test_strided_views() -> None:
    """Columns of a wider matrix, every other row, a transpose."""
    wide = torch.randn(8, 20, dtype=torch.float64)
    columns = torch.randn(5, 4, dtype=torch.float64).T
    given = [wide[::2, 3:8].requires_grad_(), columns.requires_grad_()]
    estimator = NegativeEstimator(0.1, 1.0)
    found = two_view_terms(*given, 0.5, estimator)
    agree(found, in_blocks(*given, 0.5, estimator), given, 1e-10)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", [PLAIN, NegativeEstimator(0.1, 1.0)], ids=str)
def test_autocast(half: torch.dtype, estimator: NegativeEstimator) -> None:
    """Of views in half precision: what their rounding loses and nothing more."""
    halves = [z.detach().to(half).requires_grad_() for z in views(32)]
    single = [z.detach().float().requires_grad_() for z in halves]
    with torch.autocast("cpu", dtype=half):
        found = two_view_terms(*halves, 0.5, estimator).loss
    expected = two_view_terms(*single, 0.5, estimator).loss
    assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(x, g) for x, g in ((found, halves), (expected, single)))
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two.to(half))


def test_gradients_survive_a_scaler() -> None:
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**16)):
        parameters = [torch.nn.Parameter(z.detach()) for z in views(4, dtype=torch.float32)]
        loss = two_view_terms(*parameters, 0.5).loss
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(torch.optim.SGD(parameters, lr=0.0))
        found.append([p.grad for p in parameters])
    for one, two in zip(*found, strict=True):
        assert one is not None
        assert torch.equal(one, two)


def test_second_derivative_is_refused() -> None:
    given = views(4)
    loss = two_view_contrast(*given, 2.0).loss
    (first, _) = torch.autograd.grad(loss.square(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_backward_pass_may_be_repeated() -> None:
    given = views(4)
    loss = two_view_contrast(*given, 2.0).loss
    first, second = (
        torch.autograd.grad(loss * factor, given, retain_graph=True)[0] for factor in (1.0, 2.0)
    )
    torch.testing.assert_close(2 * first, second)


def test_no_gradient_where_none_is_wanted(launches: Launches) -> None:
    given = views(4)
    full = launches(lambda: two_view_contrast(*given, 2.0, 0.1, 1.0))
    with torch.no_grad():
        assert not two_view_contrast(*given, 2.0, 0.1, 1.0).loss.requires_grad
        assert launches(lambda: two_view_contrast(*given, 2.0, 0.1, 1.0)) < full - 10
    constant = [z.detach() for z in given]
    assert not two_view_contrast(*constant, 2.0).loss.requires_grad


def test_inputs_are_left_alone() -> None:
    given = views(4)
    before = [z.detach().clone() for z in given]
    two_view_contrast(*given, 2.0, 0.1, 0.5).loss.backward()
    assert all(torch.equal(z, b) for z, b in zip(given, before, strict=True))
