"""The module as a whole, what it draws against torchvision's draws, and mixed views."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import stats
from torch import Tensor
from torchvision import transforms as T

from solo_ext.config.schema import Augmentation, Mix
from solo_ext.core.draws import sample_keys, uniforms
from solo_ext.data.batch_augment import BatchAugment, MixDraws, ViewMixer
from solo_ext.data.batch_draws import (
    AFFINE,
    EQUALIZED,
    FLIP,
    GRAY,
    HUE,
    NO_JITTER,
    PLACE,
    RADIUS,
    SOLARIZED,
    Draws,
    crop_boxes,
    draw_view,
)
from solo_ext.data.transforms import pretrain_transform

SIDE, IMAGES, DRAWS = 20, 50, 6000
CHANCES = ("color_jitter", "grayscale", "gaussian_blur", "solarization", "equalization", "flip")
EVERYTHING: dict[str, Any] = {name: {"prob": 0.4} for name in (*CHANCES[1:-1], "horizontal_flip")}
STRENGTHS = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.2, "hue": 0.1}
EVERYTHING["color_jitter"] = {"prob": 0.8, **STRENGTHS, "contrast": 0.4}
LEAST = 1e-3
"""p-value under which two samples are taken to differ; seeds are fixed."""


@pytest.fixture(scope="module")
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (IMAGES, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)


def module(**changes: Any) -> BatchAugment:
    large = Augmentation(crop_size=16, num_crops=2, **{**EVERYTHING, **changes})
    small = Augmentation(crop_size=8, num_crops=3, **{**EVERYTHING, **changes})
    return BatchAugment("custom", [large, small], SIDE, SIDE, 5)


def views(
    augment: BatchAugment, images: Tensor, samples: list[int], epoch: int = 3
) -> list[Tensor]:
    return augment(images[samples], augment.draw(epoch, np.array(samples)))


@pytest.mark.parametrize("solarized", [0.0, 0.4])
def test_views_do_not_depend_on_the_batch(
    images: Tensor, solarized: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on its order, nor on how it is cut into chunks, here of 16."""
    monkeypatch.setattr("solo_ext.data.batch_augment._CACHED_BYTES", 1)
    augment = module(solarization={"prob": solarized}, equalization={"prob": solarized})
    whole = views(augment, images, list(range(IMAGES)))
    some = [41, 3, 17, 8, 30, 0]
    for given in (some, some[::-1], some[:1], some * 40):
        for part, all_views in zip(views(augment, images, given), whole, strict=True):
            # A matrix product may round differently in another batch.
            torch.testing.assert_close(part, all_views[given], atol=2e-5, rtol=0)


def test_epochs_and_seeds_differ(images: Tensor) -> None:
    samples = list(range(IMAGES))
    this = views(module(), images, samples)
    other = module()
    other.seed = 6
    for changed in (views(module(), images, samples, epoch=4), views(other, images, samples)):
        for a, b in zip(this, changed, strict=True):
            assert not (a == b).flatten(1).all(1).any()


def test_mean_and_deviation_of_the_views_are_those_of_torchvision(images: Tensor) -> None:
    """Over many views of one image, pixel by pixel, all operations together."""
    count = 1500
    augment = module()
    drawn = augment.draw(0, np.arange(count))
    ours = augment(images[:1].expand(count, -1, -1, -1), drawn)[0]
    image = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    pipeline = augment.augmentations[0].model_copy(update={"num_crops": count})
    torch.manual_seed(0)
    theirs = torch.stack(pretrain_transform("custom", [pipeline])(image))
    error = ((ours.var(0) + theirs.var(0)) / count).sqrt()
    z = (ours.mean(0) - theirs.mean(0)) / error
    # Of 768 numbers with a common part; rounding to 8 bits makes up to 0.02.
    assert z.abs().mean() < 1.6
    ratio = ours.std(0) / theirs.std(0)
    assert (ratio.mean() - 1).abs() < 0.02


def test_runs_without_values() -> None:
    """On meta tensors, which have none: nothing waits for a device."""
    augment = module()
    pixels = torch.empty(6, 3, SIDE, SIDE, dtype=torch.uint8, device="meta")
    found = augment.to("meta")(pixels, augment.draw(0, np.arange(6)))
    assert [v.shape[-1] for v in found] == [16, 16, 8, 8, 8]


# Draws.


def drawn(count: int = DRAWS, **given: Any) -> Draws:
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
        [T.RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(DRAWS)]
    )
    draws = uniforms(sample_keys(1, 0, np.arange(DRAWS)), 0, 22)
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
        for _ in range(DRAWS)
    ]
    kinds, factors = kinds_and_factors(draws)
    for kind in range(3):
        ours = factors[kinds == kind]
        assert len(ours) == DRAWS
        expected = np.array([t[1 + kind] for t in theirs])
        assert same(ours, expected) > LEAST
    assert same(draws[:, HUE], np.array([t[4] for t in theirs], dtype=np.float32)) > LEAST


def kinds_and_factors(draws: Draws) -> tuple[NDArray[Any], NDArray[Any]]:
    """Which of brightness, contrast and saturation each step is, and with which factor."""
    keep, grey, mean = draws[:, AFFINE : AFFINE + 9].reshape(-1, 3, 3).transpose(2, 0, 1)
    kinds = np.where(mean != 0, 1, np.where(grey != 0, 2, 0))
    return kinds, keep


def test_order_of_the_jitter() -> None:
    draws = drawn(color_jitter={"prob": 1.0, **STRENGTHS})
    kinds, _ = kinds_and_factors(draws)
    place = draws[:, PLACE].astype(int)
    orders = Counter(
        (*kind[:at], 3, *kind[at:]) for kind, at in zip(kinds.tolist(), place.tolist(), strict=True)
    )
    assert set(orders) == set(itertools.permutations(range(4)))
    assert stats.chisquare(list(orders.values())).pvalue > LEAST


def test_steps_that_do_nothing() -> None:
    """Of images without jitter, and of strengths that are 0."""
    draws = drawn(color_jitter={"prob": 0.5, "brightness": 0.4})
    steps = draws[:, AFFINE:].reshape(-1, 4, 3)
    jittered = draws[:, PLACE] != NO_JITTER
    assert 0.4 < jittered.mean() < 0.6
    assert (steps[~jittered] == (1, 0, 0)).all()
    assert (steps[:, 1:] == (1, 0, 0)).all()
    assert (steps[jittered, 0, 0] != 1).all()


@pytest.mark.parametrize("prob", [0.0, 0.2, 0.5, 1.0])
def test_chances(prob: float) -> None:
    """Each with its probability, and independent of each other."""
    given: dict[str, Any] = {n: {"prob": prob} for n in (*CHANCES[:-1], "horizontal_flip")}
    given["color_jitter"] |= STRENGTHS
    draws = drawn(**given)
    radii = torch.empty(DRAWS).uniform_(0.1, 2.0, generator=torch.Generator().manual_seed(0))
    blurred = draws[:, RADIUS] > 0
    assert prob == 0 or same(draws[blurred, RADIUS], radii.numpy()) > LEAST
    whether = [draws[:, column] for column in (GRAY, SOLARIZED, EQUALIZED, FLIP)]
    assert all(set(values) <= {0, 1} for values in whether)
    grey, *rest = whether
    told = np.stack((draws[:, PLACE] != NO_JITTER, grey, blurred, *rest)).astype(float)
    bound = 4 * np.sqrt(prob * (1 - prob) / DRAWS)
    assert (abs(told.mean(1) - prob) <= bound).all()
    if 0 < prob < 1:
        assert abs(np.corrcoef(told) - np.eye(len(CHANCES))).max() < 4 / np.sqrt(DRAWS)


# Mixed views.


def mixer(name: str = "mixup", **given: Any) -> ViewMixer:
    return ViewMixer(Mix(name=name, **given), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [0.0, 0.6])
@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_shares(prob: float, least: float) -> None:
    """Uniform from the least share to 1, with the probability, of every view anew."""
    first, second = mixer(min_share=least, prob=prob).draw(0, np.arange(DRAWS), 2)
    mixed = first.share < 1
    assert abs(mixed.float().mean() - prob) <= 4 * np.sqrt(prob * (1 - prob) / DRAWS)
    if prob:
        assert (
            stats.kstest(first.share[mixed].numpy(), "uniform", (least, 1 - least)).pvalue > LEAST
        )
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
