"""Mixup and CutMix of views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from solo_ext.config.schema import Mix
from solo_ext.data.batch_augment import MixDraws, ViewMixer

COUNT = 3000


def mixer(name: str = "mixup", **given: Any) -> ViewMixer:
    return ViewMixer(Mix(name=name, **given), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [0.0, 0.6])
@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_shares(prob: float, least: float) -> None:
    """Uniform from the least share to 1, with the probability, of every view anew."""
    first, second = mixer(min_share=least, prob=prob).draw(0, np.arange(COUNT), 2)
    mixed = first.share < 1
    assert abs(mixed.float().mean() - prob) <= 4 * np.sqrt(prob * (1 - prob) / COUNT)
    if prob:
        assert stats.kstest(first.share[mixed].numpy(), "uniform", (least, 1 - least)).pvalue > 1e-3
        assert (first.share != second.share).any()
        assert (first.partner != second.partner).any()


def test_partners_are_a_single_cycle_that_the_order_of_the_batch_does_not_change() -> None:
    samples = np.array([40, 7, 3, 99, 12, 51, 8])
    (drawn,) = mixer().draw(2, samples, 1)
    seen, place = [], 0
    for _ in samples:
        seen.append(place)
        place = int(drawn.partner[place])
    assert sorted(seen) == list(range(7))
    shuffled = np.random.default_rng(0).permutation(7)
    (again,) = mixer().draw(2, samples[shuffled], 1)
    partner_of = dict(zip(samples.tolist(), samples[drawn.partner].tolist(), strict=True))
    assert [partner_of[s] for s in samples[shuffled]] == samples[shuffled][again.partner].tolist()
    assert torch.equal(again.share, drawn.share[shuffled])
    (later,) = mixer().draw(3, samples, 1)
    assert not torch.equal(later.share, drawn.share)


def test_mixup() -> None:
    views = [torch.randn(4, 3, 6, 6), torch.randn(4, 3, 3, 3)]
    mix = mixer(min_share=0.5)
    draws = mix.draw(0, np.arange(4), 2)
    for view, drawn, found in zip(views, draws, mix(views, draws), strict=True):
        for n in range(4):
            s = float(drawn.share[n])
            expected = s * view[n] + (1 - s) * view[drawn.partner[n]]
            torch.testing.assert_close(found[n], expected)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_what_is_not_drawn_is_left_alone(name: str) -> None:
    mix, view = mixer(name, prob=0.5), torch.randn(40, 3, 6, 6)
    draws = mix.draw(0, np.arange(40), 1)
    (found,) = mix([view], draws)
    alone = draws[0].share == 1
    assert 5 < alone.sum() < 35
    assert torch.equal(found[alone], view[alone])


def test_cutmix() -> None:
    """A box of the other image, of the share's area but for rounding down, cut off at the edge."""
    mix = mixer("cutmix", min_share=0.5)
    view = torch.arange(500.0).view(-1, 1, 1, 1).expand(-1, 3, 20, 20).contiguous()
    draws = mix.draw(0, np.arange(500), 1)
    (found,) = mix([view], draws)
    other = found != view
    assert torch.equal(found[other], view[draws[0].partner][other])
    assert (other[:, :1] == other).all(), "all channels alike"
    kept = 1 - other[:, 0].float().mean((1, 2))
    assert (kept >= draws[0].share - 1e-6).all()
    inside = other[:, 0]
    for axis in (1, 2):
        line = inside.any(axis).int()
        assert (line.diff(dim=1).abs().sum(1) <= 2).all(), "one box"
    areas = inside.any(1).sum(1) * inside.any(2).sum(1)
    assert torch.equal(areas, inside.sum((1, 2)))
    whole = MixDraws(torch.tensor([1, 0]), torch.full((2,), 0.75), torch.full((2, 2), 0.5))
    (found,) = mix([view[:2]], [whole])
    assert (found[0, 0] == 1).nonzero().T.aminmax(dim=1)[0].tolist() == [5, 5]
    assert (found[0, 0] == 1).sum() == 100, "sides are the root of 1 - 0.75"
