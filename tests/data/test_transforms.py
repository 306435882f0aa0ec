"""Augmentations against torchvision, parameter by parameter."""

import colorsys
import math
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
    GaussianBlur,
    MultiCrop,
    eval_transform,
    pretrain_transform,
    statistics,
)

PLAIN: dict[str, Any] = {"mean": [0.0] * 3, "std": [1.0] * 3}
SIDE = 16


def augmentation(size: int = SIDE, count: int = 1, **given: Any) -> dict[str, Any]:
    """Returns an entry of ``augmentations`` with every default; no crop unless asked for."""
    settings = {"rrc": {"enabled": False}, "crop_size": size, "num_crops": count} | given
    return Augmentation(**settings).model_dump()


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


CHANCES: dict[str, Callable[[Image.Image, Tensor], bool]] = {
    "horizontal_flip": lambda image, view: torch.equal(view, as_tensor(ImageOps.mirror(image))),
    "grayscale": lambda image, view: torch.equal(
        view, as_tensor(image.convert("L").convert("RGB"))
    ),
    "solarization": lambda image, view: torch.equal(view, as_tensor(ImageOps.solarize(image, 128))),
    "equalization": lambda image, view: torch.equal(view, as_tensor(ImageOps.equalize(image))),
    "gaussian_blur": lambda image, view: not torch.equal(view, as_tensor(image)),
    "color_jitter": lambda image, view: not torch.equal(view, as_tensor(image)),
}
"""How to tell that a transform was applied."""


@pytest.mark.parametrize("prob", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("name", CHANCES)
def test_applies_with_its_probability(name: str, prob: float) -> None:
    image, count = make_image(), 400
    extra = {"brightness": 0.4, "contrast": 0.4} if name == "color_jitter" else {}
    views = draw(image, count, **{name: {"prob": prob, **extra}})
    applied = [CHANCES[name](image, view) for view in views]
    untouched = [torch.equal(view, as_tensor(image)) for view in views]
    assert all(a != u for a, u in zip(applied, untouched, strict=True)), "neither or both"
    bound = 4 * math.sqrt(prob * (1 - prob) / count)
    assert abs(sum(applied) / count - prob) <= bound


def test_chances_are_independent() -> None:
    """Flip and solarisation fall together as often as their product says."""
    image, count = make_image(), 800
    views = draw(image, count, horizontal_flip={"prob": 0.5}, solarization={"prob": 0.4})
    both = as_tensor(ImageOps.mirror(ImageOps.solarize(image)))
    share = sum(torch.equal(view, both) for view in views) / count
    assert abs(share - 0.2) <= 4 * math.sqrt(0.2 * 0.8 / count)


def test_no_augmentation_leaves_the_image_alone() -> None:
    image = make_image()
    assert all(torch.equal(view, as_tensor(image)) for view in draw(image, 5))


@pytest.mark.parametrize("strength", ["brightness", "contrast", "saturation", "hue"])
def test_jitter_of_no_strength_changes_nothing(strength: str) -> None:
    image = make_image()
    views = draw(image, 10, color_jitter={"prob": 1.0, strength: 0.0})
    assert all(torch.equal(view, as_tensor(image)) for view in views)
    views = draw(image, 10, color_jitter={"prob": 0.0, strength: 0.4})
    assert all(torch.equal(view, as_tensor(image)) for view in views)


def _brightness(view: Tensor) -> float:
    return view.mean().item() / (100 / 255)


def _contrast(view: Tensor) -> float:
    return (view.max() - view.min()).item() / (80 / 255)


def _saturation(view: Tensor) -> float:
    return (view[0, 0, 0] - view[1, 0, 0]).item() / (40 / 255)


def _hue(view: Tensor) -> float:
    hue = colorsys.rgb_to_hsv(*view[:, 0, 0].tolist())[0]
    return hue - 1 if hue > 0.5 else hue


GREY, RED, DULL = (100, 100, 100), (200, 0, 0), (120, 80, 80)
JITTERS = {
    "brightness": ((GREY, GREY), 0.4, _brightness, (0.6, 1.4)),
    "contrast": (((60, 60, 60), (140, 140, 140)), 0.4, _contrast, (0.6, 1.4)),
    "saturation": ((DULL, DULL), 0.8, _saturation, (0.2, 1.8)),
    "hue": ((RED, RED), 0.1, _hue, (-0.1, 0.1)),
}
"""Colours of the image's halves, strength, what to measure, and its range."""


@pytest.mark.parametrize("name", JITTERS)
def test_jitter_spans_its_strength(name: str) -> None:
    colours, strength, measure, (low, high) = JITTERS[name]
    image = Image.new("RGB", (SIDE, SIDE), colours[0])
    image.paste(colours[1], (0, 0, SIDE // 2, SIDE))
    found = [measure(v) for v in draw(image, 400, color_jitter={"prob": 1.0, name: strength})]
    span = high - low
    assert low - 0.03 * span <= min(found) <= low + 0.08 * span
    assert high - 0.08 * span <= max(found) <= high + 0.03 * span
    assert np.mean(found) == pytest.approx((low + high) / 2, abs=0.07 * span)


@pytest.mark.parametrize(("low", "high"), [(0.08, 1.0), (0.2, 0.3), (0.5, 0.5), (1.0, 1.0)])
def test_crop_covers_the_asked_area(low: float, high: float) -> None:
    """The image is a ramp in both directions, so that a view tells where it was cut."""
    side, size, count = 256, 64, 150
    ramp = np.arange(side, dtype=np.uint8)
    x, y = np.broadcast_to(ramp, (side, side)), np.broadcast_to(ramp[:, None], (side, side))
    image = Image.fromarray(np.stack((x, y, np.zeros_like(x)), axis=-1))
    rrc = {"enabled": True, "crop_min_scale": low, "crop_max_scale": high}
    areas, lefts = [], []
    for view in draw(image, count, size, rrc=rrc):
        assert view.shape == (3, size, size)
        # Centres of the inner columns and rows: bicubic resizing bends the outermost.
        left, right = view[0].mean(0)[[2, -3]].tolist()
        top, bottom = view[1].mean(1)[[2, -3]].tolist()
        width, height = (
            (b - a) * 255 * size / (size - 5) for a, b in ((left, right), (top, bottom))
        )
        if low < 1:
            assert 0.95 * 3 / 4 <= width / height <= 1.05 * 4 / 3
        areas.append(width * height / side**2)
        lefts.append(left)
    assert low * 0.95 <= min(areas)
    assert max(areas) <= high * 1.05
    if high < 1:
        # Near the whole image torchvision's crop falls back where the drawn one does not fit.
        assert np.mean(areas) == pytest.approx((low + high) / 2, rel=0.05)
    assert (np.std(lefts) > 0.05) == (low < 1)


def test_without_crop_the_middle_is_kept() -> None:
    image = make_image(48, 24)
    (view,) = draw(image, 1, 12)
    expected = T.functional.center_crop(
        T.functional.resize(image, 12, T.InterpolationMode.BICUBIC), [12]
    )
    assert torch.equal(view, as_tensor(expected))


def _blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(torch.empty(()).uniform_(0.1, 2.0).item()))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [16, 20])
def test_equals_torchvision_draw_by_draw(size: int, seed: int) -> None:
    """solo-learn's order of steps, written out with torchvision's transforms."""
    image = make_image(30, 24, seed)
    settings = augmentation(
        size,
        3,
        rrc={"enabled": True, "crop_min_scale": 0.2, "crop_max_scale": 0.9},
        color_jitter={
            "prob": 0.7,
            "brightness": 0.4,
            "contrast": 0.3,
            "saturation": 0.2,
            "hue": 0.1,
        },
        grayscale={"prob": 0.3},
        gaussian_blur={"prob": 0.5},
        solarization={"prob": 0.4},
        equalization={"prob": 0.45},
        horizontal_flip={"prob": 0.6},
    )
    bicubic = T.InterpolationMode.BICUBIC
    reference = T.Compose(
        [
            T.RandomResizedCrop(size, scale=(0.2, 0.9), interpolation=bicubic),
            T.RandomApply([T.ColorJitter(0.4, 0.3, 0.2, 0.1)], p=0.7),
            T.RandomGrayscale(0.3),
            T.RandomApply([_blur], p=0.5),
            T.RandomApply([lambda i: ImageOps.solarize(i, 128)], p=0.4),
            T.RandomApply([ImageOps.equalize], p=0.45),
            T.RandomHorizontalFlip(0.6),
            T.ToTensor(),
            T.Normalize(*STATISTICS["cifar10"]),
        ]
    )
    torch.manual_seed(seed)
    views = pretrain_transform("cifar10", [settings])(image)
    torch.manual_seed(seed)
    for view in views:
        assert torch.equal(view, reference(image))


def test_blur_draws_its_radius_uniformly(monkeypatch: pytest.MonkeyPatch) -> None:
    radii: list[float] = []

    def record(radius: float) -> ImageFilter.BoxBlur:
        radii.append(radius)
        return ImageFilter.BoxBlur(0)

    monkeypatch.setattr(ImageFilter, "GaussianBlur", record)
    blur, image = GaussianBlur(), make_image(2, 2)
    torch.manual_seed(0)
    for _ in range(1000):
        blur(image)
    assert 0.1 <= min(radii) < 0.12
    assert 1.98 < max(radii) <= 2.0
    assert np.mean(radii) == pytest.approx(1.05, abs=4 * 1.9 / math.sqrt(12 * 1000))


def test_crops_are_counted_and_sized() -> None:
    crops = pretrain_transform("custom", [augmentation(12, 2), augmentation(8, 3)])(make_image())
    assert [tuple(c.shape) for c in crops] == [(3, 12, 12)] * 2 + [(3, 8, 8)] * 3


def test_crops_differ() -> None:
    first, second, third = draw(make_image(), 3, rrc={"enabled": True})
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_each_pipeline_has_its_own_settings() -> None:
    """As BYOL's second view, which alone is solarised."""
    plain, solarised = augmentation(**PLAIN), augmentation(**PLAIN, solarization={"prob": 1.0})
    image = make_image()
    views = pretrain_transform("custom", [plain, solarised])(image)
    assert torch.equal(views[0], as_tensor(image))
    assert torch.equal(views[1], as_tensor(ImageOps.solarize(image)))


def test_counts_and_transforms_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        MultiCrop([as_tensor], [1, 2])(make_image())


IMAGENET = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


@pytest.mark.parametrize(
    ("dataset", "given", "expected"),
    [
        ("cifar10", {}, ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))),
        ("cifar100", {}, ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))),
        ("stl10", {}, ((0.4914, 0.4823, 0.4466), (0.2470, 0.2430, 0.2610))),
        ("imagenet100", {}, IMAGENET),
        ("custom", {}, IMAGENET),
        ("custom", {"mean": None, "std": None}, IMAGENET),
        ("custom", {"mean": [0.1, 0.2, 0.3]}, ([0.1, 0.2, 0.3], IMAGENET_DEFAULT_STD)),
        ("custom", {"std": [0.1, 0.2, 0.3]}, (IMAGENET_DEFAULT_MEAN, [0.1, 0.2, 0.3])),
        ("custom", {"mean": [0.0] * 3, "std": [0.5] * 3}, ([0.0] * 3, [0.5] * 3)),
        ("cifar10", {"mean": [0.0] * 3}, STATISTICS["cifar10"]),
    ],
)
def test_normalises(dataset: str, given: dict[str, Any], expected: Any) -> None:
    assert statistics(dataset, given) == expected
    image, (mean, std) = make_image(), expected
    (view,) = pretrain_transform(dataset, [augmentation(**given)])(image)
    back = view * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    torch.testing.assert_close(back, as_tensor(image), rtol=0, atol=1e-6)
    torch.testing.assert_close(eval_transform(SIDE, mean, std)(image), view)


@pytest.mark.parametrize("side", [8, 32, 96, 224])
def test_evaluation_leaves_images_of_the_right_size_alone(side: int) -> None:
    image = make_image(side, side)
    view = eval_transform(side, (0.0,) * 3, (1.0,) * 3)(image)
    assert torch.equal(view, as_tensor(image))


@pytest.mark.parametrize(
    ("width", "height", "resized"),
    [
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


def test_evaluation_of_large_images_is_the_usual_one() -> None:
    image = make_image(400, 320)
    usual = T.Compose([T.Resize(256, T.InterpolationMode.BICUBIC), T.CenterCrop(224)])
    assert FixedView(224)(image).tobytes() == usual(image).tobytes()


def test_evaluation_has_no_chance() -> None:
    transform = eval_transform(32, *IMAGENET)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    image = make_image(50, 41)
    assert torch.equal(transform(image), transform(image))
    assert torch.equal(torch.get_rng_state(), state)


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
