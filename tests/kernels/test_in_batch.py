"""The in-batch contrasts against plain autograd, and that of two views against that of blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.kernels.in_batch import batch_contrast, two_view_contrast, two_view_fits
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

N, K, P, D = 5, 9, 2, 4


class Inputs(NamedTuple):
    """What both forms take; all but ``own`` may have a gradient."""

    anchors: Tensor
    candidates: Tensor
    positives: Tensor
    extra: Tensor
    own: Tensor


def inputs(powers: tuple[float, ...], dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    own = torch.stack([torch.randperm(K, generator=generator)[:2] for _ in range(N)])
    rows = [F.normalize(make(rows, D), dim=1) for rows in (N, K)]
    every = [x.requires_grad_() for x in (*rows, make(N, P), 3 * make(len(powers), N))]
    return Inputs(*every, own)


def reduce(masses: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """Treats every mass and every positive differently."""
    weights = 1 - 0.3 * torch.arange(len(masses), dtype=masses.dtype).unsqueeze(1)
    joined = (weights * masses).sum(0)
    losses = F.softplus(joined - positives[:, 0]) * positives[:, -1].cos()
    return losses, torch.stack((joined, positives[:, 0], losses))


def plain(
    given: Inputs, inverse_temperature: float, powers: tuple[float, ...], extra: bool
) -> tuple[Tensor, Tensor]:
    logits = given.anchors @ given.candidates.T * inverse_temperature
    logits = logits.scatter(1, given.own, float("-inf"))
    masses = torch.stack([(p * logits).logsumexp(1) for p in powers])
    if extra:
        masses = torch.logaddexp(masses, given.extra)
    losses, notes = reduce(masses, given.positives)
    return losses.mean(), notes


@pytest.mark.parametrize("tile", [1, 2, 5, 100, None])
@pytest.mark.parametrize("powers", [(1.0,), (0.4,), (1.7, 0.7), (2.0, 1.0), (3.0, 1.0, 0.5)])
@pytest.mark.parametrize("inverse_temperature", [2.0, 100.0])
@pytest.mark.parametrize("extra", [False, True])
def test_blocks_equal_the_plain_form(
    tile: int | None, powers: tuple[float, ...], inverse_temperature: float, extra: bool
) -> None:
    given = inputs(powers)
    found, notes = batch_contrast(
        *given[:2],
        given.own,
        given.positives,
        inverse_temperature,
        powers,
        reduce,
        given.extra if extra else None,
        tile,
    )
    loss, expected = plain(given, inverse_temperature, powers, extra)
    torch.testing.assert_close(found, loss, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(notes, expected.detach(), rtol=1e-11, atol=1e-12)
    assert not notes.requires_grad
    wanted = given[:4] if extra else given[:3]
    ours, theirs = (torch.autograd.grad(3 * x, wanted) for x in (found, loss))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("learns", range(4))
def test_gradient_of_each_alone(learns: int) -> None:
    """Each of anchors, candidates, positives and further masses may be the only one."""
    powers = (1.7, 0.7)
    every = inputs(powers)
    given = Inputs(*(x if i == learns else x.detach() for i, x in enumerate(every[:4])), every.own)
    found, _ = batch_contrast(
        *given[:2], given.own, given.positives, 3.0, powers, reduce, given.extra, 2
    )
    loss, _ = plain(given, 3.0, powers, True)
    ours, theirs = (torch.autograd.grad(x, given[learns])[0] for x in (found, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_anchors_may_be_the_candidates() -> None:
    rows = inputs((1.0,)).candidates
    own = torch.arange(K).unsqueeze(1)
    given = Inputs(rows, rows, torch.zeros(K, 1).double(), torch.empty(0), own)
    found, _ = batch_contrast(rows, rows, own, given.positives, 3.0, (1.0,), reduce, tile=4)
    ours, theirs = (
        torch.autograd.grad(x, rows)[0] for x in (found, plain(given, 3.0, (1.0,), False)[0])
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("inverse_temperature", [1.0, 50.0])
def test_gradcheck_of_blocks(inverse_temperature: float) -> None:
    given = inputs((1.7, 0.7))

    def fused(*tensors: Tensor) -> Tensor:
        anchors, candidates, positives, extra = tensors
        return batch_contrast(
            anchors,
            candidates,
            given.own,
            positives,
            inverse_temperature,
            (1.7, 0.7),
            reduce,
            extra,
            2,
        )[0]

    assert torch.autograd.gradcheck(fused, given[:4])


@pytest.mark.parametrize(
    ("inverse_temperature", "powers"),
    [(2.0, (1.0,)), (39.9, (1.0,)), (40.1, (1.0,)), (100.0, (1.0,)), (2.0, (201.0, 200.0))],
)
@pytest.mark.parametrize("spread", [1.0, 0.0, -1.0])
def test_single_precision_keeps_up(
    inverse_temperature: float, powers: tuple[float, ...], spread: float
) -> None:
    """Where the bound on similarities serves as the shift, at its edge, and where it cannot.

    Rows all about, all equal, and candidates all opposite to the anchors.
    """
    generator = torch.Generator().manual_seed(0)
    centre = F.normalize(torch.randn(16, generator=generator, dtype=torch.float64), dim=0)
    noise = F.normalize(torch.randn(96, 16, generator=generator, dtype=torch.float64), dim=1)
    rows = noise if spread == 1 else centre.repeat(96, 1)
    single = [rows[:32].float(), (spread or 1) * rows[32:].float()]
    exact = [x.double().requires_grad_() for x in single]
    single = [x.requires_grad_() for x in single]
    own = torch.arange(32).unsqueeze(1)
    # Where the masses lie, or the gradient would vanish.
    targets = (
        torch.full((32, 1), 0.5 if spread == 1 else spread or 1).double() * inverse_temperature
    )

    def both(masses: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
        mass = masses[0] - masses[1] if len(masses) > 1 else masses[0]
        return F.softplus(mass - positives[:, 0]), masses

    found, notes = batch_contrast(*single, own, targets.float(), inverse_temperature, powers, both)
    logits = (exact[0] @ exact[1].T * inverse_temperature).scatter(1, own, float("-inf"))
    masses = torch.stack([(p * logits).logsumexp(1) for p in powers])
    expected = both(masses, targets)[0].mean()
    assert found.dtype == torch.float32
    torch.testing.assert_close(notes.double(), masses.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    ours = torch.autograd.grad(found, single)
    theirs = torch.autograd.grad(expected, exact)
    for one, two in zip(ours, theirs, strict=True):
        assert two.abs().max() > 1e-4
        least = 1e-4 * two.abs().max().item()
        torch.testing.assert_close(one.double(), two, rtol=2e-3, atol=least)


def test_backward_pass_of_blocks_may_be_repeated() -> None:
    """And follows the factor of the loss, which a scaler of half precision makes large."""
    given = inputs((1.7, 0.7))
    loss, _ = batch_contrast(*given[:2], given.own, given.positives, 3.0, (1.7, 0.7), reduce)
    first, second = (
        torch.autograd.grad(loss * factor, given[:3], retain_graph=True) for factor in (1, 2**16)
    )
    for one, two in zip(first, second, strict=True):
        assert torch.equal(2**16 * one, two)


def test_second_derivative_of_blocks_is_refused() -> None:
    given = inputs((1.0,))
    loss = batch_contrast(*given[:2], given.own, given.positives, 3.0, (1.0,), reduce)[0]
    (first,) = torch.autograd.grad(loss.square(), given.anchors, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_gradient_of_blocks_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs((1.0,))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a gradient is made that nobody wants")

    with torch.no_grad():
        loss = batch_contrast(*given[:2], given.own, given.positives, 3.0, (1.0,), reduce)[0]
    assert not loss.requires_grad
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    constant = [x.detach() for x in given[:3]]
    again = batch_contrast(*constant[:2], given.own, constant[2], 3.0, (1.0,), reduce)[0]
    assert not again.requires_grad
    assert torch.equal(loss, again)


def test_memory_is_a_tenth_of_the_plain_form_s(peak_bytes: PeakBytes) -> None:
    rows = F.normalize(torch.randn(4096, 64), dim=1).requires_grad_()
    own = torch.stack((torch.arange(4096), torch.arange(4096).roll(2048)), 1)
    positives = torch.zeros(4096, 1)

    def loss(masses: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return F.softplus(masses[0] - targets[:, 0]), masses

    def fused() -> None:
        batch_contrast(rows, rows, own, positives, 2.0, (1.0,), loss)[0].backward()

    def formula() -> None:
        logits = (rows @ rows.T * 2).scatter(1, own, float("-inf"))
        F.softplus(logits.logsumexp(1)).mean().backward()

    assert peak_bytes(fused) * 10 <= peak_bytes(formula)


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
def test_two_views_equal_the_blocks(
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
@drawn(
    images=st.integers(2, 9),
    dim=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 5.0),
    tau_plus=st.just(0.0) | st.floats(1e-3, 0.95),
    beta=st.sampled_from([0.0, 1.0]) | st.floats(0.01, 4.0),
    detach=st.booleans(),
)
def test_two_views_equal_the_blocks_anywhere(
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

    # The package's attribute of the module's name is the function.
    module = sys.modules["solo_ext.losses.contrastive"]
    monkeypatch.setattr(module, "two_view_contrast", noting)

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
    monkeypatch.setattr(distributed, "gather_with_gradient", lambda x: x)
    assert not takes(2, 0.5)


@pytest.mark.parametrize("name", LOSSES)
def test_few_launches(launches: Launches, name: str) -> None:
    """Loss, gradient and what is logged; the form in blocks takes about twice as many."""
    given = views(256, 128, dtype=torch.float32)
    most = {"NT-Xent": 42, "debiased": 49, "hard": 60}[name]
    assert launches(lambda: torch.autograd.grad(LOSSES[name](*given), given)) <= most


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
def test_gradcheck_of_two_views(tau_plus: float, beta: float, temperature: float) -> None:
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


def test_backward_pass_of_two_views_may_be_repeated() -> None:
    """And follows the factor of the loss, which a scaler of half precision makes large."""
    given = views(4)
    loss = two_view_contrast(*given, 2.0, 0.1, 0.5).loss
    first, second = (
        torch.autograd.grad(loss * factor, given, retain_graph=True) for factor in (1, 2**16)
    )
    for one, two in zip(first, second, strict=True):
        assert torch.equal(2**16 * one, two)


def test_second_derivative_of_two_views_is_refused() -> None:
    given = views(4)
    loss = two_view_contrast(*given, 2.0).loss
    (first, _) = torch.autograd.grad(loss.square(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_gradient_of_two_views_where_none_is_wanted(launches: Launches) -> None:
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
