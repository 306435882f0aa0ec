"""Views of images: a function of seed, epoch and index, whatever process makes them."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import transforms as T

from solo_ext.config.schema import Augmentation
from solo_ext.data.images import open_images
from solo_ext.data.reading import Images
from solo_ext.data.sampler import SampleKey
from solo_ext.data.transforms import MultiCrop, pretrain_transform
from solo_ext.data.views import FixedViews, TrainingViews
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


def test_views_are_of_the_sample(images: Images) -> None:
    views = TrainingViews(images, transform(), 0)
    assert len(views) == SIZE
    index, crops, target = views[SampleKey(3, 25)]
    assert (index, target) == (25, 1)
    assert [tuple(crop.shape) for crop in crops] == [(3, 8, 8)] * 2
    assert not torch.equal(*crops)


def test_views_depend_on_seed_epoch_and_index_alone(images: Images) -> None:
    keys = [SampleKey(epoch, index) for epoch in (0, 1, 7) for index in (0, 3, 41)]
    found = []
    for seed, order in ((0, keys), (99, keys[::-1])):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        views = TrainingViews(images, transform(), 5)
        found.append({key: views[key] for key in order})
    assert all(same(found[0][key], found[1][key]) for key in keys)


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


def test_views_leave_all_generators_alone(images: Images) -> None:
    views = TrainingViews(images, transform(), 0)
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr] # noqa: NPY002
    views[SampleKey(0, 0)]
    views[SampleKey(1, 7)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tobytes() == before[2]  # type: ignore[index,union-attr] # noqa: NPY002


def test_a_failing_transform_leaves_the_generator_alone() -> None:
    def fail(_: Any) -> Any:
        torch.rand(3)
        raise OSError("broken image")

    images: Any = [(Image.new("RGB", (4, 4)), 0)]
    state = torch.get_rng_state()
    with pytest.raises(OSError, match="broken image"):
        TrainingViews(images, MultiCrop([fail], [1]), 0)[SampleKey(0, 0)]
    assert torch.equal(torch.get_rng_state(), state)


def test_fixed_views(images: Images) -> None:
    views = FixedViews(images, T.ToTensor())
    assert len(views) == SIZE
    view, target = views[SIZE - 1]
    assert torch.equal(view, T.functional.to_tensor(images[SIZE - 1][0]))
    assert target == 1


@pytest.mark.parametrize("part", [False, True])
def test_is_pickled_whole(images: Any, part: bool) -> None:
    """Workers that are spawned get the views by pickle."""
    views = TrainingViews(Subset(images, [5, 2, 3, 9]) if part else images, transform(), 0)
    copy = pickle.loads(pickle.dumps(views))
    assert same(views[SampleKey(2, 3)], copy[SampleKey(2, 3)])
