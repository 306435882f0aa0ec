"""The contrastive family against its formulas, anchor by anchor and sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.kernels.mixed_logsumexp import MixDraws
from solo_ext.losses.contrastive import (
    PLAIN,
    Mixing,
    NegativeEstimator,
    batch_of_views,
    contrastive,
    debiased_loss_func,
    hard_negative_loss_func,
    nt_xent_loss_func,
    plain_contrastive,
    two_view_terms,
)
from solo_ext.losses.mochi import draw_mixes

N, K, D, HARD = 3, 8, 4, 3
ESTIMATORS = {
    "plain": PLAIN,
    "debiased": NegativeEstimator(0.1),
    "mostly clamped": NegativeEstimator(0.6),
    "concentrated": NegativeEstimator(0.0, 1.5),
    "hard": NegativeEstimator(0.1, 0.7),
    "hard, detached": NegativeEstimator(0.2, 0.7, detach_weights=True),
}
MIXES = {"none": None, "no draws": (0, 0), "pairs": (4, 0), "with anchor": (0, 3), "both": (4, 3)}
KINDS = [*((one, "none") for one in ESTIMATORS), *(("hard", one) for one in MIXES if one != "none")]
"""Mixtures are more candidates, whatever the estimator: each with the one that has every part."""


class Expected(NamedTuple):
    """What the formulas say."""

    losses: Tensor
    clamped: float
    hardness: float
    mined: float
    mixed: float


def mean_of_exponentials(logits: list[Tensor], beta: float, detached: bool) -> Tensor:
    """Mean of exp(s), weighted by exp(beta s)."""
    weights = [(beta * s).exp() for s in logits]
    if detached:
        weights = [w.detach() for w in weights]
    total = sum(w * s.exp() for w, s in zip(weights, logits, strict=True))
    return torch.as_tensor(total / sum(weights))


def mixtures(anchor: Tensor, negatives: list[Tensor], mixing: Mixing, row: int) -> list[Tensor]:
    """Eq. 4 and 5 of MoCHi as written; constants."""
    draws, made = mixing.draws, []
    for (i, j), share in zip(draws.pair_indices[row].tolist(), draws.alpha[row], strict=True):
        made.append(share * negatives[i] + (1 - share) * negatives[j])
    for j, share in zip(draws.single_indices[row].tolist(), draws.beta[row], strict=True):
        made.append(share * anchor + (1 - share) * negatives[j])
    return [(h / h.norm()).detach() for h in made]


def mean(values: Sequence[Any]) -> float:
    return float(sum(float(v) for v in values) / len(values)) if values else math.nan


def reference(
    anchors: Tensor,
    positives: Tensor,
    candidates: Tensor,
    own: Sequence[Tensor] | Tensor | None,
    estimator: NegativeEstimator,
    mixing: Mixing | None,
    temperature: float,
) -> Expected:
    """The loss by its formulas, on scalars that carry a gradient."""
    losses, clamped, hardness, mined, mixed = [], [], [], [], []
    for row, anchor in enumerate(anchors):
        excluded = [] if own is None else own[row].tolist()
        negatives = [c for k, c in enumerate(candidates) if k not in excluded]
        if mixing is not None and mixing.count:
            ranked = sorted(negatives, key=lambda c: -(anchor @ c).item())[: mixing.num_hard]
            made = mixtures(anchor, ranked, mixing, row)
            mined += [(anchor @ c).item() for c in ranked]
            mixed += [(anchor @ h).item() for h in made]
            negatives = negatives + made
        logits = [anchor @ c / temperature for c in negatives]
        targets = [anchor @ p / temperature for p in positives[row]]
        negative, positive = (
            mean_of_exponentials(s, estimator.beta, estimator.detach_weights)
            for s in (logits, targets)
        )
        estimate = (negative - estimator.tau_plus * positive) / (1 - estimator.tau_plus)
        floor = torch.tensor(math.exp(-1 / temperature), dtype=anchors.dtype)
        clamped.append(bool(estimate <= floor))
        estimate = floor if clamped[-1] else estimate
        hardness.append(temperature * estimate.detach().log())
        mass = len(negatives) * estimate
        losses.append(torch.stack([-(s.exp() / (s.exp() + mass)).log() for s in targets]))
    return Expected(torch.stack(losses), mean(clamped), mean(hardness), mean(mined), mean(mixed))


def unit(*shape: int, generator: torch.Generator) -> Tensor:
    rows = torch.randn(*shape, D, generator=generator, dtype=torch.float64)
    return F.normalize(rows, dim=-1).requires_grad_()


def make_mixing(mixes: str, anchors: Tensor, generator: torch.Generator) -> Mixing | None:
    numbers = MIXES[mixes]
    if numbers is None:
        return None
    return Mixing(HARD, draw_mixes(anchors, HARD, *numbers, generator=generator))


def check(found: Any, expected: Expected, inputs: list[Tensor]) -> None:
    """Compares values, and the gradients of the mean."""
    torch.testing.assert_close(found.loss, expected.losses.mean(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.losses, expected.losses.detach(), rtol=1e-10, atol=1e-12)
    for name in ("clamped", "hardness", "mined", "mixed"):
        value = getattr(found, name)
        assert not value.requires_grad
        assert value.item() == pytest.approx(getattr(expected, name), rel=1e-9, nan_ok=True), name
    assert not found.losses.requires_grad
    ours = torch.autograd.grad(found.loss, inputs, allow_unused=True)
    theirs = torch.autograd.grad(expected.losses.mean(), inputs, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if a is None else a,
            torch.zeros_like(zero if a is None else a) if b is None else b,
            rtol=1e-8,
            atol=1e-11,
        )


@pytest.mark.parametrize(("estimator", "mixes"), KINDS)
def test_candidates_of_the_anchor_s_image_are_no_negatives(estimator: str, mixes: str) -> None:
    """One of the first anchor's, two of the second's, none of the third's; or of several ids."""
    generator = torch.Generator().manual_seed(len(mixes))
    anchors, positives = unit(N, generator=generator), unit(N, 1, generator=generator)
    candidates = unit(K, generator=generator).detach()
    settings: Any = {
        "estimator": ESTIMATORS[estimator],
        "mixing": make_mixing(mixes, anchors, generator),
        "temperature": 0.4,
    }
    ids = {
        "anchor_ids": torch.tensor([5, 7, 9]),
        "candidate_ids": torch.tensor([1, 7, 5, -1, 7, 2, -1, 3]),
    }
    several = ids | {"anchor_ids": torch.tensor([[5, 2, 5], [7, 9, 8], [9, -2, 3]])}
    for numbers, excluded in ((ids, ([2], [1, 4], [])), (several, ([2, 5], [1, 4], [7]))):
        found = contrastive(anchors, positives, candidates, **numbers, **settings)
        own = [torch.tensor(columns) for columns in excluded]
        expected = reference(anchors, positives, candidates, own, **settings)
        check(found, expected, [anchors, positives])
    for wrong in ({"anchor_ids": ids["anchor_ids"]}, {**ids, "excluded_columns": torch.ones(N, 1)}):
        with pytest.raises(ValueError, match="anchor_ids and candidate_ids: give both"):
            contrastive(anchors, positives, candidates, **wrong, **settings)


@pytest.mark.parametrize(("estimator", "mixes"), KINDS)
@pytest.mark.parametrize("pool", ["queue", "learnable", "own columns", "queue with own columns"])
@pytest.mark.parametrize("count", [1, 2])
def test_equals_the_loop(count: int, pool: str, estimator: str, mixes: str) -> None:
    generator = torch.Generator().manual_seed(len(mixes) + 10 * count)
    anchors, positives = unit(N, generator=generator), unit(N, count, generator=generator)
    candidates = unit(K, generator=generator)
    own = torch.stack([torch.randperm(K, generator=generator)[:2] for _ in range(N)])
    excluded = own if "own" in pool else None
    settings: Any = {
        "estimator": ESTIMATORS[estimator],
        "mixing": make_mixing(mixes, anchors, generator),
        "temperature": 0.4,
    }
    inputs = [anchors, positives]
    if pool.startswith("queue"):
        candidates = candidates.detach()
    else:
        inputs.append(candidates)
    rows = anchors, positives, candidates
    found = contrastive(*rows, excluded_columns=excluded, **settings)
    expected = reference(*rows, excluded, **settings)
    check(found, expected, inputs)
    if mixes == "none":
        shares = {"tau_plus": settings["estimator"].tau_plus, "beta": settings["estimator"].beta}
        by_matrix = plain_contrastive(*rows, excluded, temperature=0.4, **shares)
        torch.testing.assert_close(by_matrix, expected.losses.mean(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("number", "estimator", "mixes"),
    [(3, *kind) for kind in KINDS] + [(number, "hard", "both") for number in (2, 4)],
)
def test_views_against_each_other(number: int, estimator: str, mixes: str) -> None:
    """Straight from the views: anchors are all of them, negatives those of other images."""
    generator = torch.Generator().manual_seed(number)
    views = [5 * unit(N, generator=generator).detach().requires_grad_() for _ in range(number)]
    batch = batch_of_views(views)
    rows = [
        (v, i, F.normalize(z, dim=0)) for v, view in enumerate(views) for i, z in enumerate(view)
    ]
    everything = torch.stack([row for *_, row in rows])
    positives = torch.stack(
        [torch.stack([row for u, j, row in rows if j == i and u != v]) for v, i, _ in rows]
    )
    own = torch.tensor([[k for k, (_, j, _) in enumerate(rows) if j == i] for _, i, _ in rows])
    mixing = make_mixing(mixes, everything, generator)
    found = contrastive(
        **batch._asdict(), estimator=ESTIMATORS[estimator], mixing=mixing, temperature=0.4
    )
    expected = reference(everything, positives, everything, own, ESTIMATORS[estimator], mixing, 0.4)
    check(found, expected, views)


def test_what_is_unranked_is_mixed_all_the_same() -> None:
    """Without a rank the indices mean the same rows, in another order."""
    generator = torch.Generator().manual_seed(0)
    anchors, positives = unit(N, generator=generator), unit(N, 1, generator=generator)
    queue = unit(K, generator=generator).detach()
    pair = torch.tensor([[0, 1], [0, 2], [1, 2], [1, 0], [2, 0], [2, 1]]).expand(N, -1, -1)
    half = torch.full((N, 6), 0.5, dtype=torch.float64)
    single = torch.arange(HARD).expand(N, -1)
    draws = MixDraws(pair, half, single, half[:, :HARD] / 2)
    ranked, unranked = (
        contrastive(
            anchors, positives, queue, mixing=Mixing(HARD, draws, ranked=order), temperature=0.4
        )
        for order in (True, False)
    )
    torch.testing.assert_close(ranked.loss, unranked.loss, rtol=1e-12, atol=0)
    assert ranked.mined == pytest.approx(unranked.mined.item())


@pytest.mark.parametrize("excluded", [0, 2])
def test_more_hard_ones_than_there_are_are_all(excluded: int) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors, positives = unit(N, generator=generator), unit(N, 1, generator=generator)
    rows = anchors, positives, unit(K, generator=generator).detach()
    own = torch.arange(excluded).expand(N, -1) if excluded else None
    draws = draw_mixes(anchors, K - excluded, 5, 5, generator)
    fits, all_rows, many = (
        contrastive(*rows, excluded_columns=own, mixing=Mixing(number, draws), temperature=0.4)
        for number in (K - excluded, K, 1000)
    )
    assert fits.mined.isfinite()
    for other in (all_rows, many):
        assert torch.equal(fits.loss, other.loss)
        assert torch.equal(fits.mined, other.mined)


@pytest.mark.parametrize("pool", ["queue", "own columns"])
def test_no_negatives_give_a_zero_on_the_graph(pool: str) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors, positives = unit(2, generator=generator), unit(2, 3, generator=generator)
    candidates = unit(0 if pool == "queue" else 2, generator=generator)
    terms = contrastive(
        anchors,
        positives,
        candidates,
        excluded_columns=None if pool == "queue" else torch.tensor([[0, 1], [1, 0]]),
        estimator=NegativeEstimator(0.1, 1.0),
        mixing=Mixing(4, draw_mixes(anchors, 4, 2, 2)),
        temperature=0.1,
    )
    assert terms.loss.item() == terms.clamped.item() == 0
    assert torch.equal(terms.losses, torch.zeros(2, 3, dtype=torch.float64))
    assert all(math.isnan(value) for value in terms[3:])
    for gradient in torch.autograd.grad(terms.loss, [anchors, positives, candidates]):
        assert not gradient.any()


def make_views(batch: int, dim: int = 5, *, seed: int = 0, noise: float = 0.7) -> list[Tensor]:
    """Two fp64 views, similar row by row, of any scale."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    noises = torch.randn(2, batch, dim, generator=generator, dtype=torch.float64)
    scales = 0.2 + 5 * torch.rand(2, batch, 1, generator=generator, dtype=torch.float64)
    return [z.requires_grad_() for z in scales * (centres + noise * noises)]


@drawn(deadline=None, max_examples=60)
@given(
    batch=st.integers(2, 4),
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3.0),
    estimator=st.builds(
        NegativeEstimator,
        st.sampled_from([0.0, 0.05, 0.1, 0.5]),
        st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        st.booleans(),
    ),
)
def test_two_views_equal_the_loop(
    batch: int, seed: int, temperature: float, estimator: NegativeEstimator
) -> None:
    """The anchor's negatives are the 2B - 2 views of other images."""
    views = make_views(batch, seed=seed)
    rows = torch.cat([F.normalize(z, dim=1) for z in views])
    own = torch.stack((torch.arange(2 * batch), torch.arange(2 * batch).roll(batch)), dim=1)
    positives = rows.roll(batch, 0).unsqueeze(1)
    expected = reference(rows, positives, rows, own, estimator, None, temperature)
    found = two_view_terms(*views, temperature, estimator)
    torch.testing.assert_close(found.losses, expected.losses.detach(), rtol=1e-8, atol=1e-11)
    gradients = [torch.autograd.grad(x, views) for x in (found.loss, expected.losses.mean())]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    settings = estimator.tau_plus, estimator.beta, estimator.detach_weights
    hard = hard_negative_loss_func(*views, temperature, *settings)
    assert torch.equal(hard, found.loss)
    if not estimator.beta:
        assert torch.equal(debiased_loss_func(*views, temperature, estimator.tau_plus), hard)
        if not estimator.tau_plus:
            assert torch.equal(nt_xent_loss_func(*views, temperature), hard)


@pytest.mark.parametrize("estimator", [NegativeEstimator(0.1), NegativeEstimator(0.9, 0.5)])
def test_floored_anchors_do_not_push_their_negatives(estimator: NegativeEstimator) -> None:
    """On the floor only the positive is left: the gradient is that of a loss without negatives."""
    views = make_views(6, 16, noise=0.05)
    terms = two_view_terms(views[0], views[1], 0.1, estimator)
    assert terms.clamped.item() == 1
    positive = F.cosine_similarity(*views) / 0.1
    alone = F.softplus(math.log(10) - 1 / 0.1 - positive).mean()
    torch.testing.assert_close(terms.loss, alone, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(x, views) for x in (terms.loss, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-14)


def test_all_weight_on_the_hardest() -> None:
    """A large beta leaves copies of the hardest negative; a small one is continuous at zero."""
    views = make_views(4)
    rows = F.normalize(torch.cat(views), dim=1)
    logits = rows @ rows.T / 0.5
    same = torch.arange(4).repeat(2).unsqueeze(0) == torch.arange(4).repeat(2).unsqueeze(1)
    hardest = logits.masked_fill(same, -math.inf).amax(1)
    positive = logits.diagonal(4).repeat(2)
    expected = F.softplus(hardest + math.log(6) - positive).mean()
    torch.testing.assert_close(hard_negative_loss_func(*views, 0.5, 0.0, 1e5), expected)
    near = hard_negative_loss_func(*views, 0.5, 0.0, 1e-9)
    torch.testing.assert_close(near, nt_xent_loss_func(*views, 0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors": torch.ones(3)}, r"anchors must be \(N, D\)"),
        ({"positives": torch.ones(3, 4)}, r"positives \(N, P, D\), got \(3, 4\) and \(3, 4\)"),
        ({"positives": torch.ones(2, 1, 4)}, r"\(2, 1, 4\)"),
        ({"positives": torch.ones(3, 0, 4)}, "at least one"),
        ({"candidates": torch.ones(5, 3)}, r"candidates must be \(K, 4\).*\(5, 3\)"),
        ({"excluded_columns": torch.zeros(2, 1).long()}, r"must be \(3, m\), got \(2, 1\)"),
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"mixing": Mixing(2, draw_mixes(torch.ones(2, 4), 2, 1, 1))}, "draws for 2 anchors"),
        (
            {"candidates": torch.ones(5, 4, requires_grad=True), "compute_dtype": torch.bfloat16},
            "compute_dtype=torch.bfloat16: is for a queue",
        ),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "anchors": torch.ones(3, 4),
        "positives": torch.ones(3, 1, 4),
        "candidates": torch.ones(5, 4),
        "temperature": 0.1,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        contrastive(**arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau_plus": -0.1}, r"tau_plus=-0.1: must lie in \[0, 1\)"),
        ({"tau_plus": 1.0}, "tau_plus=1.0"),
        ({"beta": -0.1}, "beta=-0.1: must be 0 or more"),
        ({"beta": math.nan}, "beta=nan"),
        ({"z1": torch.ones(3, 4)}, r"must both be \(N, D\)"),
    ],
)
def test_named_losses_refuse(settings: dict[str, Any], message: str) -> None:
    z1, z2 = make_views(4)
    with pytest.raises(ValueError, match=message):
        hard_negative_loss_func(**{"z1": z1, "z2": z2, **settings})
