"""Parameters drawn for a batch against those that torchvision draws, one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torchvision import transforms as T

from solo_ext.config.schema import Augmentation
from solo_ext.core.draws import sample_keys, uniforms
from solo_ext.data.batch_augment import ViewDraws, crop_boxes, draw_view

COUNT = 6000
STRENGTHS = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.2, "hue": 0.1}
LEAST = 1e-3
"""p-value under which two samples are taken to differ; seeds are fixed."""


def drawn(count: int = COUNT, **given: Any) -> ViewDraws:
    augmentation = Augmentation(crop_size=32, num_crops=1, **given)
    return draw_view(augmentation, sample_keys(5, 0, np.arange(count)), 0, 32, 32)


def same(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """p-value that two samples of integers or reals are of one distribution."""
    if ours.dtype.kind == "f":
        return float(stats.ks_2samp(ours, theirs).pvalue)
    values, edges = np.union1d(ours, theirs), 25
    if len(values) > edges:
        bins = np.unique(np.quantile(theirs, np.linspace(0, 1, edges)))
        ours, theirs = np.digitize(ours, bins), np.digitize(theirs, bins)
        values = np.union1d(ours, theirs)
    table = np.array([[(sample == v).sum() for v in values] for sample in (ours, theirs)])
    table = table[:, table.sum(0) > 0]
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [(32, 32, (0.08, 1.0)), (32, 32, (0.2, 1.0)), (96, 96, (0.05, 0.14)), (40, 24, (0.3, 1.0))],
)
def test_crop_boxes(height: int, width: int, scale: tuple[float, float]) -> None:
    """Places, sides and their products, among them those that the fallback gives."""
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array(
        [T.RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(COUNT)]
    )
    draws = uniforms(sample_keys(1, 0, np.arange(COUNT)), 0, 22)
    ours = crop_boxes(draws, height, width, scale)
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    for column in range(4):
        assert same(ours[:, column], theirs[:, column]) > LEAST, "ijhw"[column]
    area, ratio = (
        (b[:, 2] * b[:, 3] for b in (ours, theirs)),
        (b[:, 3] / b[:, 2] for b in (ours, theirs)),
    )
    assert same(*area) > LEAST
    assert same(*ratio) > LEAST


@pytest.mark.parametrize("sides", [(8, 64), (64, 8), (32, 32), (30, 40)])
def test_fallback(sides: tuple[int, int]) -> None:
    """No try fits where the whole area is asked for of an image of an extreme ratio."""
    draws = uniforms(sample_keys(1, 0, np.arange(400)), 0, 22)
    ours = set(map(tuple, crop_boxes(draws, *sides, (1.0, 1.0)).tolist()))
    torch.manual_seed(0)
    image = torch.empty(3, *sides)
    theirs = {
        tuple(int(v) for v in T.RandomResizedCrop.get_params(image, [1.0, 1.0], [3 / 4, 4 / 3]))
        for _ in range(400)
    }
    assert ours == theirs


def test_jitter_factors() -> None:
    draws = drawn(color_jitter={"prob": 1.0, **STRENGTHS})
    torch.manual_seed(0)
    jitter = T.ColorJitter(**STRENGTHS)
    theirs = [
        jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        for _ in range(COUNT)
    ]
    kinds, factors = kinds_and_factors(draws)
    for kind in range(3):
        ours = factors[kinds == kind]
        assert len(ours) == COUNT
        expected = np.array([t[1 + kind] for t in theirs])
        assert same(ours, expected) > LEAST
    assert draws.hue is not None
    assert same(draws.hue.numpy(), np.array([t[4] for t in theirs], dtype=np.float32)) > LEAST


def kinds_and_factors(draws: ViewDraws) -> tuple[NDArray[Any], NDArray[Any]]:
    """Which of brightness, contrast and saturation each step is, and with which factor."""
    keep, grey, mean = draws.affine.numpy().transpose(2, 0, 1)
    kinds = np.where(mean != 0, 1, np.where(grey != 0, 2, 0))
    return kinds, keep


def test_order_of_the_jitter() -> None:
    draws = drawn(color_jitter={"prob": 1.0, **STRENGTHS})
    kinds, _ = kinds_and_factors(draws)
    stops = np.array(draws.hue_stops)
    place = np.searchsorted(stops, np.arange(COUNT), side="right") - 1
    orders = Counter(
        (*kind[:at], 3, *kind[at:]) for kind, at in zip(kinds.tolist(), place.tolist(), strict=True)
    )
    assert set(orders) == set(itertools.permutations(range(4)))
    assert stats.chisquare(list(orders.values())).pvalue > LEAST


CHANCES = ("color_jitter", "grayscale", "gaussian_blur", "solarization", "equalization", "flip")


@pytest.mark.parametrize("prob", [0.0, 0.2, 0.5, 1.0])
def test_chances(prob: float) -> None:
    """Each with its probability, and independent of each other."""
    given: dict[str, Any] = {n: {"prob": prob} for n in (*CHANCES[:-1], "horizontal_flip")}
    given["color_jitter"] |= STRENGTHS
    draws = drawn(**given)
    told = np.zeros((len(CHANCES), COUNT))
    told[0, : draws.hue_stops[-1]] = 1
    told[1], told[5] = draws.gray, draws.flip
    radii = torch.empty(COUNT).uniform_(0.1, 2.0, generator=torch.Generator().manual_seed(0))
    assert prob == 0 or same(draws.radius.numpy(), radii.numpy()) > LEAST
    for place, rows in ((2, draws.blurred), (3, draws.solarized), (4, draws.equalized)):
        told[place, rows] = 1
    bound = 4 * np.sqrt(prob * (1 - prob) / COUNT)
    assert (abs(told.mean(1) - prob) <= bound).all()
    if 0 < prob < 1:
        assert abs(np.corrcoef(told) - np.eye(len(CHANCES))).max() < 4 / np.sqrt(COUNT)


def test_part_of_the_draws() -> None:
    given: dict[str, Any] = {n: {"prob": 0.5} for n in CHANCES[:-1]}
    given["color_jitter"] |= STRENGTHS
    whole = drawn(100, **given)
    pieces = [whole.part(start, min(start + 30, 100)) for start in range(0, 100, 30)]
    for name in ("rows", "box", "flip", "affine", "hue", "gray", "radius"):
        joined = torch.cat([getattr(p, name) for p in pieces])
        assert torch.equal(joined, getattr(whole, name)), name
    for name in ("blurred", "solarized", "equalized"):
        shifted = [getattr(p, name) + 30 * i for i, p in enumerate(pieces)]
        assert torch.equal(torch.cat(shifted), getattr(whole, name)), name
    lengths = np.array([np.diff(p.hue_stops) for p in pieces]).sum(0)
    assert lengths.tolist() == np.diff(whole.hue_stops).tolist()
    assert sorted(whole.rows.tolist()) == list(range(100))
