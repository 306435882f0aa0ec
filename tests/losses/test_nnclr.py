"""The symmetric loss of NNCLR against its formula."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses.contrastive import NegativeEstimator
from solo_ext.losses.mochi import Mixing, draw_mixes
from solo_ext.losses.nnclr import nnclr_symmetric_loss_func, nnclr_terms


def make(batch: int, seed: int = 0) -> list[Tensor]:
    """Returns fp64 neighbours and predictions, similar row by row, of any scale."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(batch, 5, generator=generator, dtype=torch.float64)
    noises = torch.randn(2, batch, 5, generator=generator, dtype=torch.float64)
    return [z.requires_grad_() for z in 3 * (centres + 0.7 * noises)]


def loop(nn: Tensor, p: Tensor, temperature: float, columns: bool) -> Tensor:
    """Eq. 3, or with the sum over the neighbours instead, as written."""
    nn, p = F.normalize(nn, dim=1), F.normalize(p, dim=1)
    losses = []
    for i in range(len(nn)):
        others = [
            (torch.dot(nn[k], p[i]) if columns else torch.dot(nn[i], p[k])) / temperature
            for k in range(len(nn))
        ]
        losses.append(-(others[i].exp() / sum(s.exp() for s in others)).log())
    return torch.stack(losses).mean()


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5.0),
    symmetric=st.booleans(),
)
def test_value_and_gradient_equal_the_loop(
    batch: int, seed: int, temperature: float, symmetric: bool
) -> None:
    inputs = make(batch, seed)
    expected = loop(*inputs, temperature, False)
    if symmetric:
        expected = (expected + loop(*inputs, temperature, True)) / 2
    loss = nnclr_symmetric_loss_func(*inputs, temperature, symmetric)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x, inputs) for x in (loss, expected))
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)


def test_roles_are_exchanged_by_the_column_term_alone() -> None:
    nn, p = make(5)
    both = nnclr_symmetric_loss_func(nn, p)
    torch.testing.assert_close(both, nnclr_symmetric_loss_func(p, nn), rtol=1e-12, atol=0)
    row, column = (nnclr_symmetric_loss_func(*pair, symmetric=False) for pair in ((nn, p), (p, nn)))
    assert abs(row.item() - column.item()) > 1e-3


def test_constant_neighbours_get_no_gradient() -> None:
    nn, p = make(4)
    loss = nnclr_symmetric_loss_func(nn.detach(), p)
    (found,) = torch.autograd.grad(loss, p)
    (expected,) = torch.autograd.grad(nnclr_symmetric_loss_func(nn, p), p)
    torch.testing.assert_close(found, expected)


def test_estimator_applies_to_both_directions() -> None:
    inputs = make(5)
    estimator = NegativeEstimator(0.1, 1.0)
    loss, rows = nnclr_terms(*inputs, 0.5, True, estimator)
    _, columns = nnclr_terms(*inputs[::-1], 0.5, True, estimator)
    torch.testing.assert_close(loss, (rows.loss + columns.loss) / 2)
    assert abs(loss.item() - nnclr_symmetric_loss_func(*inputs, 0.5).item()) > 1e-3


def test_mixtures_are_of_the_row_term_and_of_other_samples_predictions() -> None:
    nn, p = make(5)
    draws = draw_mixes(nn, 3, 6, 4, torch.Generator().manual_seed(0))
    loss, rows = nnclr_terms(nn, p, 0.5, True, mixing=Mixing(3, draws))
    anchors, predictions = F.normalize(nn, dim=1), F.normalize(p, dim=1)
    losses = []
    for i, anchor in enumerate(anchors):
        others = torch.cat((predictions[:i], predictions[i + 1 :]))
        hard = others[(others @ anchor).argsort(descending=True)[:3]].detach()
        first, second = (hard[indices] for indices in draws.pair_indices[i].unbind(1))
        alpha, beta = draws.alpha[i].unsqueeze(1), draws.beta[i].unsqueeze(1)
        pairs = alpha * first + (1 - alpha) * second
        singles = beta * anchor.detach() + (1 - beta) * hard[draws.single_indices[i]]
        made = F.normalize(torch.cat((pairs, singles)), dim=1)
        logits = torch.cat((predictions[i : i + 1], others, made)) @ anchor / 0.5
        losses.append(F.cross_entropy(logits, torch.tensor(0)))
    row = torch.stack(losses).mean()
    expected = (row + loop(nn, p, 0.5, True)) / 2
    torch.testing.assert_close(rows.loss, row)
    torch.testing.assert_close(loss, expected)
    for one, two in zip(*(torch.autograd.grad(x, [nn, p]) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(one, two)
    assert rows.mixed > rows.mined


@pytest.mark.parametrize("temperature", [0.0, -0.1, math.nan])
def test_refuses_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        nnclr_symmetric_loss_func(*make(3), temperature)


@pytest.mark.parametrize(("first", "second"), [((3, 4), (4, 4)), ((4,), (4,)), ((2, 3, 4),) * 2])
def test_refuses_shapes(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"nn and p must both be \(N, D\)"):
        nnclr_symmetric_loss_func(torch.ones(first), torch.ones(second))
