"""Order and views of the samples: functions of seed, epoch and index, enterable anywhere."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Subset

from solo_ext.config.schema import Augmentation
from solo_ext.data.images import open_images
from solo_ext.data.reading import Images
from solo_ext.data.transforms import MultiCrop, pretrain_transform
from solo_ext.data.views import EpochSampler, SampleKey, TrainingViews
from tests.data.making import same, save_image, section

SIZE = 42


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """Two classes of 21 images."""
    root = tmp_path_factory.mktemp("images")
    for number in range(SIZE):
        save_image(root / "ab"[number // 21] / f"{number:02d}.png", number)
    return open_images(section(root), "train")


def transform() -> MultiCrop:
    """Returns a transform with every kind of chance."""
    chance = {"prob": 0.5}
    settings = Augmentation(
        crop_size=8,
        num_crops=2,
        color_jitter={**chance, "brightness": 0.4, "hue": 0.1},  # type: ignore[arg-type]
        grayscale=chance,  # type: ignore[arg-type]
        gaussian_blur=chance,  # type: ignore[arg-type]
        solarization=chance,  # type: ignore[arg-type]
        equalization=chance,  # type: ignore[arg-type]
        horizontal_flip=chance,  # type: ignore[arg-type]
    )
    return pretrain_transform("custom", [settings])


def test_views_depend_on_seed_epoch_and_index_alone(images: Images) -> None:
    keys = [SampleKey(epoch, index) for epoch in (0, 1, 7) for index in (0, 3, 41)]
    found = []
    for seed, order in ((0, keys), (99, keys[::-1])):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr] # noqa: NPY002
        views = TrainingViews(images, transform(), 5)
        found.append({key: views[key] for key in order})
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tobytes() == before[2]  # type: ignore[index,union-attr] # noqa: NPY002
    assert all(same(found[0][key], found[1][key]) for key in keys)
    assert all(found[0][key][::2] == (key.sample, key.sample // 21) for key in keys)


def test_views_differ_by_seed_epoch_and_index() -> None:
    """One and the same image everywhere, so that only the draws differ."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    images: Any = [(Image.fromarray(pixels), 0)] * 4
    drawn = [
        TrainingViews(images, transform(), seed)[SampleKey(epoch, index)][1]
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2)
        for index in range(4)
    ]
    assert not any(same(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


@pytest.mark.parametrize("part", [False, True])
def test_is_pickled_whole(images: Any, part: bool) -> None:
    """Workers that are spawned get the views by pickle."""
    views = TrainingViews(Subset(images, [5, 2, 3, 9]) if part else images, transform(), 0)
    copy = pickle.loads(pickle.dumps(views))
    assert same(views[SampleKey(2, 3)], copy[SampleKey(2, 3)])


@pytest.fixture(params=["drawn", "computed"], autouse=True, scope="module")
def _both_orders(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "computed":
            patch.setattr("solo_ext.core.draws.LARGE", 0)
        yield


def order(
    size: int,
    seed: int = 0,
    *,
    epoch: int = 0,
    start: int = 0,
    replicas: int | None = None,
    rank: int | None = None,
) -> list[int]:
    """Returns the samples of one epoch of one rank."""
    sampler = EpochSampler(size, seed, replicas, rank)
    sampler.set_epoch(epoch)
    sampler.start = start
    keys = list(sampler)
    assert all(isinstance(key, SampleKey) and key.epoch == epoch for key in keys)
    return [key.sample for key in keys]


@given(size=st.integers(1, 60), seed=st.integers(0, 2**62), epoch=st.integers(0, 10_000))
def test_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    samples = order(size, seed, epoch=epoch)
    assert sorted(samples) == list(range(size))
    assert len(EpochSampler(size, seed)) == size
    assert order(size, seed, epoch=epoch) == samples
    if size > 30:
        assert order(size, seed, epoch=epoch + 1) != samples != order(size, seed + 1, epoch=epoch)


@given(size=st.integers(1, 60), replicas=st.integers(1, 7), data=st.data())
def test_ranks_share_the_epoch_out(size: int, replicas: int, data: st.DataObject) -> None:
    shares = [order(size, epoch=1, replicas=replicas, rank=r) for r in range(replicas)]
    assert {len(share) for share in shares} == {size // replicas}
    together = list(itertools.chain.from_iterable(shares))
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(size))
    start, rank = data.draw(st.integers(0, size // replicas)), replicas - 1
    rest = order(size, replicas=replicas, rank=rank, epoch=1, start=start)
    assert rest == shares[-1][start:]


def test_ranks_together_are_one_process() -> None:
    """A batch of one process is that of two, whatever their number."""
    alone = order(20, 3, epoch=2)
    shares = [order(20, 3, epoch=2, replicas=2, rank=rank) for rank in range(2)]
    assert [sample for pair in zip(*shares, strict=True) for sample in pair] == alone


def test_an_epoch_under_way_keeps_its_number() -> None:
    sampler = EpochSampler(10, 0)
    under_way = iter(sampler)
    keys = [next(under_way)]
    sampler.set_epoch(1)
    keys += under_way
    assert [key.sample for key in keys] == order(10)
    assert {key.epoch for key in keys} == {0}


def test_takes_the_ranks_of_a_late_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = EpochSampler(11, 0)
    assert len(sampler) == 11
    monkeypatch.setattr("solo_ext.core.distributed.world_size", lambda: 3)
    monkeypatch.setattr("solo_ext.core.distributed.rank", lambda: 2)
    assert len(sampler) == 3
    assert [key.sample for key in sampler] == order(11, replicas=3, rank=2)
