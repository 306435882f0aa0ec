"""Which augmentations leave nothing to chance: told, and seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from solo_ext.config.schema import Augmentation, Mix
from solo_ext.data.transforms import first_random_setting, pretrain_transform

FIXED: dict[str, Any] = {"rrc": {"enabled": False}, "crop_size": 32, "num_crops": 1}


def filled(**changes: Any) -> dict[str, Any]:
    return Augmentation(**{**FIXED, **changes}).model_dump()


def views_differ(pipeline: dict[str, Any]) -> bool:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    transform = pretrain_transform("custom", [pipeline])
    torch.manual_seed(0)
    first, *others = (transform(Image.fromarray(pixels))[0] for _ in range(20))
    return any(not torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"rrc": {}}, "rrc.enabled=true"),
        ({"color_jitter": {"prob": 0.5}}, None),
        ({"color_jitter": {"prob": 1.0, "hue": 0.1}}, "color_jitter.prob=1.0"),
        ({"color_jitter": {"brightness": 0.4}}, None),
        ({"gaussian_blur": {"prob": 1.0}}, "gaussian_blur.prob=1.0"),
        *(
            ({name: {"prob": prob}}, f"{name}.prob=0.5" if prob == 0.5 else None)
            for name in ("grayscale", "solarization", "equalization", "horizontal_flip")
            for prob in (0.0, 0.5, 1.0)
        ),
    ],
)
def test_settings(changes: dict[str, Any], says: str | None) -> None:
    pipeline = filled(**changes)
    found = first_random_setting([filled(), pipeline])
    assert found == (says and f"augmentations.1.{says}")
    assert views_differ(pipeline) == (says is not None)


def test_whole_images_may_lose_a_line() -> None:
    found = first_random_setting([filled(rrc={"crop_min_scale": 1.0})])
    assert found == "augmentations.0.rrc.enabled=true"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rand_augment": {}}, "augmentations.0.rand_augment={'num_ops': 2, 'magnitude': 9}"),
        ({"auto_augment": {"policy": "svhn"}}, "augmentations.0.auto_augment={'policy': 'svhn'}"),
    ],
)
def test_policies_are_chance(changes: dict[str, Any], says: str) -> None:
    assert first_random_setting([filled(**changes)]) == says
    assert views_differ(filled(**changes))


@pytest.mark.parametrize(
    ("prob", "says"), [(0.0, None), (0.5, "data.mix.prob=0.5"), (1.0, "data.mix.prob=1.0")]
)
def test_mixing_is_chance(prob: float, says: str | None) -> None:
    assert first_random_setting([filled()], Mix(name="mixup", prob=prob).model_dump()) == says
