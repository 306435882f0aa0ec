"""Augmentations against torchvision, parameter by parameter."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision import transforms as T

from solo_ext.config.schema import Augmentation
from solo_ext.data.transforms import (
    STATISTICS,
    FixedView,
    eval_transform,
    pretrain_transform,
    statistics,
)

PLAIN: dict[str, Any] = {"mean": [0.0] * 3, "std": [1.0] * 3}
SIDE = 16


def augmentation(size: int = SIDE, count: int = 1, **given: Any) -> Augmentation:
    """Returns an entry of ``augmentations`` with every default; no crop unless asked for."""
    settings = {"rrc": {"enabled": False}, "crop_size": size, "num_crops": count} | given
    return Augmentation(**settings)


def make_image(width: int = SIDE, height: int = SIDE, seed: int = 0) -> Image.Image:
    """Returns a colour image without any symmetry."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def draw(image: Image.Image, count: int, size: int = SIDE, **given: Any) -> list[Tensor]:
    """Returns views (3, S, S) in [0, 1], of one pipeline."""
    transform = pretrain_transform("custom", [augmentation(size, count, **PLAIN, **given)])
    torch.manual_seed(0)
    return transform(image)


def as_tensor(image: Image.Image) -> Tensor:
    return T.functional.to_tensor(image)  # type: ignore[no-any-return]


def _blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(torch.empty(()).uniform_(0.1, 2.0).item()))


EVERY_CHANCE: dict[str, Any] = {
    "rrc": {"enabled": True, "crop_min_scale": 0.2, "crop_max_scale": 0.9},
    "color_jitter": {
        "prob": 0.7,
        "brightness": 0.4,
        "contrast": 0.3,
        "saturation": 0.2,
        "hue": 0.1,
    },
    "grayscale": {"prob": 0.3},
    "gaussian_blur": {"prob": 0.5},
    "solarization": {"prob": 0.4},
    "equalization": {"prob": 0.45},
    "horizontal_flip": {"prob": 0.6},
}


def reference(size: int, given: dict[str, Any]) -> Callable[[Image.Image], Tensor]:
    """solo-learn's order of steps, written out with torchvision's transforms."""
    bicubic = T.InterpolationMode.BICUBIC
    steps: list[Any] = [T.Resize(size, bicubic), T.CenterCrop(size)]
    if "rrc" in given:
        scale = (given["rrc"]["crop_min_scale"], given["rrc"]["crop_max_scale"])
        steps = [T.RandomResizedCrop(size, scale=scale, interpolation=bicubic)]
    if "color_jitter" in given:
        strengths = [v for k, v in given["color_jitter"].items() if k != "prob"]
        jitter = T.ColorJitter(*strengths)
        steps.append(T.RandomApply([jitter], p=given["color_jitter"]["prob"]))
    if "grayscale" in given:
        steps.append(T.RandomGrayscale(given["grayscale"]["prob"]))
    for name, change in (
        ("gaussian_blur", _blur),
        ("solarization", lambda image: ImageOps.solarize(image, 128)),
        ("equalization", ImageOps.equalize),
    ):
        if name in given:
            steps.append(T.RandomApply([change], p=given[name]["prob"]))
    if "horizontal_flip" in given:
        steps.append(T.RandomHorizontalFlip(given["horizontal_flip"]["prob"]))
    return T.Compose([*steps, T.ToTensor(), T.Normalize(*STATISTICS["cifar10"])])  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [16, 20])
@pytest.mark.parametrize("names", ["", *EVERY_CHANCE, " ".join(EVERY_CHANCE)])
def test_equals_torchvision_draw_by_draw(names: str, size: int) -> None:
    """Every chance alone, which does not draw where it is not asked for, and all of them."""
    given = {name: EVERY_CHANCE[name] for name in names.split()}
    views = pretrain_transform("cifar10", [augmentation(size, 8, **given)])
    expected = reference(size, given)
    for seed in range(4):
        image = make_image(30, 24, seed)
        torch.manual_seed(seed)
        found = views(image)
        torch.manual_seed(seed)
        assert all(torch.equal(view, expected(image)) for view in found)


def test_each_pipeline_has_its_own_settings() -> None:
    """As BYOL's second view, which alone is solarised."""
    plain, solarised = augmentation(**PLAIN), augmentation(**PLAIN, solarization={"prob": 1.0})
    image = make_image()
    views = pretrain_transform("custom", [plain, solarised])(image)
    assert torch.equal(views[0], as_tensor(image))
    assert torch.equal(views[1], as_tensor(ImageOps.solarize(image)))


IMAGENET = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


@pytest.mark.parametrize(
    ("dataset", "given", "expected"),
    [
        ("cifar10", {}, ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))),
        ("imagenet100", {}, IMAGENET),
        ("custom", {"mean": None, "std": None}, IMAGENET),
        ("custom", {"mean": [0.1, 0.2, 0.3]}, ([0.1, 0.2, 0.3], IMAGENET_DEFAULT_STD)),
        ("custom", {"mean": [0.0] * 3, "std": [0.5] * 3}, ([0.0] * 3, [0.5] * 3)),
        ("cifar10", {"mean": [0.0] * 3}, STATISTICS["cifar10"]),
    ],
)
def test_normalises(dataset: str, given: dict[str, Any], expected: Any) -> None:
    assert statistics(dataset, augmentation(**given)) == expected
    image, (mean, std) = make_image(), expected
    (view,) = pretrain_transform(dataset, [augmentation(**given)])(image)
    back = view * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    torch.testing.assert_close(back, as_tensor(image), rtol=0, atol=1e-6)
    torch.testing.assert_close(eval_transform(SIDE, mean, std)(image), view)


@pytest.mark.parametrize(
    ("width", "height", "resized"),
    [
        (32, 32, 32),
        (28, 28, 32),
        (20, 60, 32),
        (32, 64, 32),
        (64, 32, 32),
        (33, 33, 37),
        (500, 375, 37),
        (48, 300, 37),
    ],
)
def test_evaluation_scales_others_to_the_size_of_pretraining(
    width: int, height: int, resized: int
) -> None:
    """7/8 of the shorter side is kept; what is too small is scaled up to 32, never to 224."""
    image = make_image(width, height)
    view = eval_transform(32, (0.0,) * 3, (1.0,) * 3)(image)
    assert view.shape == (3, 32, 32)
    expected = T.functional.resize(image, resized, T.InterpolationMode.BICUBIC)
    assert torch.equal(view, as_tensor(T.functional.center_crop(expected, [32])))
    large = make_image(400, 320)
    usual = T.Compose([T.Resize(256, T.InterpolationMode.BICUBIC), T.CenterCrop(224)])
    assert FixedView(224)(large).tobytes() == usual(large).tobytes()


POLICIES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "rand_augment": (
        {"num_ops": 3, "magnitude": 12},
        lambda: T.RandAugment(num_ops=3, magnitude=12),
    ),
    **{
        f"auto_augment {policy}": (
            {"policy": policy},
            lambda policy=policy: T.AutoAugment(T.AutoAugmentPolicy(policy)),  # type: ignore[misc]
        )
        for policy in ("imagenet", "cifar10", "svhn")
    },
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_follow_the_crop_and_draw_from_torch_alone(name: str) -> None:
    given, made = POLICIES[name]
    image = make_image(24, 24)
    section = {name.split()[0]: given, "rrc": {"enabled": True}, "grayscale": {"prob": 1.0}}
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    before = random.getstate(), np.random.get_state(legacy=True)[1].copy()  # type: ignore[index, union-attr] # noqa: NPY002
    views = draw(image, 20, **section)
    assert random.getstate() == before[0]
    assert (np.random.get_state(legacy=True)[1] == before[1]).all()  # type: ignore[index] # noqa: NPY002
    crop = T.RandomResizedCrop(SIDE, (0.08, 1.0), interpolation=T.InterpolationMode.BICUBIC)
    policy, grey = made(), T.RandomGrayscale(1.0)
    torch.manual_seed(0)
    for view in views:
        expected = as_tensor(grey(policy(crop(image))))
        assert torch.equal(view, expected)


def test_cutout() -> None:
    """A square of a quarter of the view, of the mean colour; a view in four has none."""
    erasing = {"prob": 0.75, "min_scale": 0.25, "max_scale": 0.25, "max_ratio": 1.0}
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    transform = pretrain_transform("custom", [augmentation(**PLAIN, random_erasing=erasing)])
    torch.manual_seed(0)
    erased = torch.stack([transform(image)[0] for _ in range(400)]) == 0
    assert (erased.all(1) == erased.any(1)).all()
    found = erased.all(1)
    some = found.flatten(1).any(1)
    assert 0.7 < some.float().mean() < 0.8
    rows, columns = found[some].any(2), found[some].any(1)
    assert set(rows.sum(1).tolist()) == set(columns.sum(1).tolist()) == {SIDE // 2}
    assert torch.equal(found[some], rows.unsqueeze(2) & columns.unsqueeze(1))
    assert (found.float().mean(0) > 0).all(), "anywhere"
