"""The in-batch contrast: in blocks against plain autograd, of two views at once against blocks."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.measure import peak_bytes
from solo_ext.core import distributed
from solo_ext.kernels.in_batch import batch_contrast, two_view_contrast, two_view_fits
from solo_ext.losses import debiased_loss_func, hard_negative_loss_func, nt_xent_loss_func
from solo_ext.losses.contrastive import (
    NegativeEstimator,
    batch_of_views,
    contrastive,
    two_view_terms,
)
from tests.kernels.conftest import Force, Launches, Tiled, unit

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
    tiled: Tiled,
    tile: int | None,
    powers: tuple[float, ...],
    inverse_temperature: float,
    extra: bool,
) -> None:
    tiled(tile)
    given = inputs(powers)
    rest = inverse_temperature, powers, reduce, given.extra if extra else None
    found, notes = batch_contrast(*given[:2], given.own, given.positives, *rest)
    loss, expected = plain(given, inverse_temperature, powers, extra)
    torch.testing.assert_close(found, loss, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(notes, expected.detach(), rtol=1e-11, atol=1e-12)
    assert not notes.requires_grad
    wanted = given[:4] if extra else given[:3]
    ours, theirs = (torch.autograd.grad(3 * x, wanted) for x in (found, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("learns", range(4))
def test_gradient_of_each_alone(tiled: Tiled, learns: int) -> None:
    """Each of anchors, candidates, positives and further masses may be the only one."""
    tiled(2)
    powers = (1.7, 0.7)
    every = inputs(powers)
    given = Inputs(*(x if i == learns else x.detach() for i, x in enumerate(every[:4])), every.own)
    found, _ = batch_contrast(
        *given[:2], given.own, given.positives, 3.0, powers, reduce, given.extra
    )
    loss, _ = plain(given, 3.0, powers, True)
    ours, theirs = (torch.autograd.grad(x, given[learns])[0] for x in (found, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("inverse_temperature", "powers"),
    [(2.0, (1.0,)), (39.9, (1.0,)), (40.1, (1.0,)), (100.0, (1.0,)), (2.0, (201.0, 200.0))],
)
@pytest.mark.parametrize("spread", [1.0, 0.0, -1.0])
def test_single_precision_keeps_up(
    inverse_temperature: float, powers: tuple[float, ...], spread: float, force: Force
) -> None:
    """Where the bound on similarities serves as the shift, at its edge, and where it cannot.

    Rows all about, all equal, and candidates all opposite to the anchors. In blocks, because what
    is tried are their shifts.
    """
    force("tiles")
    rows = unit(96, 16) if spread == 1 else unit(1, 16).repeat(96, 1)
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


def test_memory_is_a_tenth_of_the_plain_form_s() -> None:
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
    for name in ("loss", "losses", "clamped", "hardness", "mined", "mixed"):
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
def test_two_views_equal_the_blocks(
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
def test_two_views_in_single_precision_on_the_floor_and_off_it(beta: float) -> None:
    single = [z.detach().float().requires_grad_() for z in views(24, 16, noise=0.3)]
    for tau_plus, temperature in ((0.0, 0.2), (0.1, 0.5), (0.6, 0.3)):
        found = check(single, temperature, NegativeEstimator(tau_plus, beta), 2e-5)
    assert found.clamped > 0


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


def test_two_views_at_once_are_taken_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for one image, large batches, low temperatures nor many ranks."""
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
def test_two_views_take_few_launches_and_matrices(launches: Launches, loss: Any) -> None:
    """Loss, gradient and what is logged; the form in blocks takes about twice as many."""
    given = [z.detach().float().requires_grad_() for z in views(256, 128)]
    assert launches(lambda: torch.autograd.grad(loss(*given), given)) <= 60
    matrices = 3 if loss is hard_negative_loss_func else 2
    assert peak_bytes(lambda: loss(*given).backward()) < (matrices + 0.35) * 4 * 512**2
