"""Learnable prototypes stay unit rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from solo_ext.memory import Prototypes


def test_starts_as_random_directions() -> None:
    torch.manual_seed(0)
    weight = Prototypes(200, 8).weight
    assert weight.requires_grad
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(200))
    assert weight.detach().T.cov().diagonal().min() > 0.05
    torch.manual_seed(0)
    assert torch.equal(Prototypes(200, 8).weight, weight)


def test_normalize_is_in_place() -> None:
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


def test_from_rows_copies_and_draws_nothing() -> None:
    rows = 3 * torch.randn(5, 4)
    before, generator = rows.clone(), torch.get_rng_state()
    prototypes = Prototypes.from_rows(rows)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(prototypes.weight.detach(), F.normalize(rows, dim=1))
    assert prototypes.weight.requires_grad
    with torch.no_grad():
        prototypes.weight.zero_()
    assert torch.equal(rows, before)
