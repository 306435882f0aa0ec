"""The in-batch contrast in blocks against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.in_batch import batch_contrast

PeakBytes = Callable[[Callable[[], Any]], int]
Tiled = Callable[[int | None], None]
Force = Callable[[dispatch.Form], None]

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
    found, notes = batch_contrast(
        *given[:2],
        given.own,
        given.positives,
        inverse_temperature,
        powers,
        reduce,
        given.extra if extra else None,
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
