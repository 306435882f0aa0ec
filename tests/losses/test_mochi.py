"""MoCHi: the loss against its plain form, its limits, and the draws."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses.contrastive import Mixing, contrastive
from solo_ext.losses.info_nce import info_nce_loss_func
from solo_ext.losses.mochi import draw_mixes, mochi_loss_func, plain_mochi
from tests.losses.conftest import same


def make(rows: int, queue: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns fp64 query and positive of any scale, and a queue of unit rows."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, rows, 5, generator=generator, dtype=torch.float64)
    query, positive = 3 * (centres + 0.7 * noise)
    table = torch.randn(queue, 5, generator=generator, dtype=torch.float64)
    return query.requires_grad_(), positive.requires_grad_(), F.normalize(table, dim=1)


@settings(deadline=None, max_examples=50)
@given(
    rows=st.integers(1, 4),
    queue=st.integers(1, 9),
    num_hard=st.integers(1, 12),
    pairs=st.integers(0, 4),
    singles=st.integers(0, 3),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.07, 2.0),
)
def test_equals_the_plain_form(
    rows: int, queue: int, num_hard: int, pairs: int, singles: int, seed: int, temperature: float
) -> None:
    """Of which ``test_contrastive.py`` has the loop, mixture by mixture."""
    query, positive, table = make(rows, queue, seed)
    mined, generator = min(num_hard, queue), torch.Generator().manual_seed(seed)
    draws = draw_mixes(query, mined, pairs, singles, generator)
    found = mochi_loss_func(query, positive, table, temperature, num_hard, draws=draws)
    unit = F.normalize(query, dim=1), F.normalize(positive, dim=1)
    expected = plain_mochi(*unit, table, mined, draws, temperature)
    same(found, expected, [query, positive], values=(1e-9, 1e-12), slopes=(1e-7, 1e-10))


def test_draws_of_its_own() -> None:
    """The value lies where random draws put it, and follows the global generator."""
    query, positive, table = make(4, 20)
    torch.manual_seed(3)
    found = mochi_loss_func(query, positive, table, 0.2, 8, 30, 10)
    torch.manual_seed(3)
    anchors, keys = F.normalize(query, dim=1), F.normalize(positive, dim=1).unsqueeze(1)
    mixing = Mixing(8, draw_mixes(anchors, 8, 30, 10), ranked=False)
    terms = contrastive(anchors, keys, table, mixing=mixing, temperature=0.2)
    assert torch.equal(found, terms.loss)
    assert not torch.equal(found, mochi_loss_func(query, positive, table, 0.2, 8, 30, 10))
    assert found > info_nce_loss_func(query, positive, table, 0.2)
    # Mixtures of the hardest are harder than the hardest are on average.
    assert terms.mixed > terms.mined


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hard": 0}, "num_hard=0: must be above 0"),
        ({"num_pair_mixes": -1}, "num_pair_mixes=-1: must be at least 0"),
        ({"num_query_mixes": -1}, "num_query_mixes=-1: must be at least 0"),
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"positive": torch.ones(4, 5)}, r"query and positive must both be \(N, D\)"),
        ({"queue": torch.ones(5, 4)}, r"queue must be \(K, 5\)"),
        ({"draws": draw_mixes(torch.ones(2, 5), 4, 1, 1)}, "draws for 2 anchors, there are 3"),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    query, positive, queue = make(3, 6)
    with pytest.raises(ValueError, match=message):
        mochi_loss_func(**{"query": query, "positive": positive, "queue": queue, **changes})


@pytest.mark.parametrize("field", ["pair_indices", "alpha", "single_indices", "beta"])
def test_draws_that_do_not_fit_together_are_refused(field: str) -> None:
    draws = draw_mixes(torch.zeros(4, 3), 5, 6, 2)
    wrong = draws._replace(**{field: getattr(draws, field)[:, :1]})
    with pytest.raises(ValueError, match=r"must be \(N, s, 2\)"):
        Mixing(5, wrong)


@pytest.mark.parametrize("num_hard", [1, 2, 7])
def test_draws(num_hard: int) -> None:
    anchors = torch.ones(50, 3)
    draws = draw_mixes(anchors, num_hard, 200, 100, torch.Generator().manual_seed(0))
    for indices in (draws.pair_indices, draws.single_indices):
        counts = indices.flatten().bincount(minlength=num_hard) / indices.numel()
        assert len(counts) == num_hard
        torch.testing.assert_close(counts, torch.full((num_hard,), 1 / num_hard), atol=0.02, rtol=0)
    if num_hard > 1:
        first, second = draws.pair_indices.unbind(2)
        assert (first != second).all()
        pairs = (first * num_hard + second).flatten().bincount(minlength=num_hard**2)
        expected = first.numel() / (num_hard * (num_hard - 1))
        off = ~torch.eye(num_hard, dtype=torch.bool).flatten()
        assert (pairs[off] / expected - 1).abs().max() < 0.25
    for share, most in ((draws.alpha, 1.0), (draws.beta, 0.5)):
        assert share.min() > 0
        assert share.max() < most
        assert share.mean().item() == pytest.approx(most / 2, abs=0.01)
    again = draw_mixes(anchors, num_hard, 200, 100, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(draws, again, strict=True))


def test_shares_are_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform numbers start at zero, once in millions of draws; precision is the anchors'."""
    monkeypatch.setattr(
        torch, "rand", lambda shape, **given: torch.zeros(shape, dtype=given["dtype"])
    )
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        draws = draw_mixes(torch.ones(2, 3, dtype=dtype), 4, 2, 2)
        for share in (draws.alpha, draws.beta):
            assert share.dtype == expected
            assert share.min() > 0
