"""The symmetric loss of NNCLR against its formula."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.contrastive import Mixing, NegativeEstimator
from solo_ext.losses.mochi import draw_mixes, plain_mochi
from solo_ext.losses.nnclr import nnclr_symmetric_loss_func, nnclr_terms
from tests.losses.conftest import same


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
    same(loss, expected, inputs, values=(1e-9, 1e-12), slopes=(1e-7, 1e-10))


def test_estimator_applies_to_both_directions() -> None:
    inputs = make(5)
    estimator = NegativeEstimator(0.1, 1.0)
    loss, rows = nnclr_terms(*inputs, 0.5, True, estimator)
    _, columns = nnclr_terms(*inputs[::-1], 0.5, True, estimator)
    torch.testing.assert_close(loss, (rows.loss + columns.loss) / 2)
    assert abs(loss.item() - nnclr_symmetric_loss_func(*inputs, 0.5).item()) > 1e-3


@pytest.mark.parametrize(
    "estimator", [NegativeEstimator(), NegativeEstimator(0.1), NegativeEstimator(0.1, 1.0)]
)
def test_one_matrix_serves_both_directions(
    estimator: NegativeEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, gradients and what is logged are those of each direction by itself."""
    found = []
    for form in ("plain", "tiles"):
        inputs = make(6)
        monkeypatch.setattr(dispatch, "_form", lambda *_, form=form: form)
        loss, rows = nnclr_terms(*inputs, 0.5, True, estimator)
        found.append((loss, torch.autograd.grad(loss, inputs), rows._asdict()))
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("form", ["plain", "tiles"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_pairs_in_one_go_are_each_pair_by_itself(
    form: str, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_form", lambda *_, form=form: form)
    estimator, pairs = NegativeEstimator(0.1, 1.0), [make(6, seed) for seed in range(3)]
    inputs = [x for pair in pairs for x in pair]
    each = [nnclr_terms(*pair, 0.5, symmetric, estimator) for pair in pairs]
    apart = torch.stack([loss for loss, _ in each]).mean()
    nn, p = (F.normalize(torch.stack(x), dim=2) for x in zip(*pairs, strict=True))
    together, rows = nnclr_terms(nn, p, 0.5, symmetric, estimator, joined=(nn, p))
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs) for x in (together, apart)))
    torch.testing.assert_close(rows.losses, torch.cat([terms.losses for _, terms in each]))
    for name in ("loss", "clamped", "hardness"):
        mean = torch.stack([getattr(terms, name) for _, terms in each]).mean()
        torch.testing.assert_close(getattr(rows, name), mean)


def test_mixtures_are_of_the_row_term_and_of_other_samples_predictions() -> None:
    nn, p = make(5)
    draws = draw_mixes(nn, 3, 6, 4, torch.Generator().manual_seed(0))
    loss, rows = nnclr_terms(nn, p, 0.5, True, mixing=Mixing(3, draws))
    anchors, predictions = F.normalize(nn, dim=1), F.normalize(p, dim=1)
    terms = []
    for i in range(5):
        own, others = slice(i, i + 1), torch.cat((predictions[:i], predictions[i + 1 :]))
        drawn = MixDraws(*(x[own] for x in draws))
        # The mixtures' rows are constants, the others are not.
        terms.append(plain_mochi(anchors[own], predictions[own], others, 3, drawn, 0.5))
    row = torch.stack(terms).mean()
    expected = (row + loop(nn, p, 0.5, True)) / 2
    torch.testing.assert_close(rows.loss, row)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, [nn, p]) for x in (loss, expected)))
    assert rows.mixed > rows.mined


def test_refuses() -> None:
    with pytest.raises(ValueError, match="temperature=nan"):
        nnclr_symmetric_loss_func(*make(3), math.nan)
    with pytest.raises(ValueError, match=r"nn and p must both be \(N, D\)"):
        nnclr_symmetric_loss_func(torch.ones(3, 4), torch.ones(4, 4))
