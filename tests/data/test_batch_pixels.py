"""Every operation on a batch against torchvision and PIL with the same parameters."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as T
from torchvision.transforms.v2 import functional as F

from solo_ext.config.schema import Augmentation
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.batch_draws import EQUALIZED, FLIP, GRAY, RADIUS, SOLARIZED, Draws
from solo_ext.data.batch_ops import (
    AxisResampler,
    _blur_matrices,
    bicubic_matrices,
    blur,
    jitter_,
    resample,
    shift_hue_,
)
from solo_ext.data.transforms import pretrain_transform

PLAIN: dict[str, Any] = {"mean": [0.0] * 3, "std": [1.0] * 3}


def pixels(n: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth colour images with noise: (N, 3, H, W), uint8."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    noisy = smooth + 0.05 * torch.randn(smooth.shape, generator=generator)
    return (noisy.clamp(0, 1) * 255).to(torch.uint8)


def pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def unit(images: list[Image.Image]) -> Tensor:
    return torch.stack([T.to_tensor(image) for image in images])


def augmentation(**given: Any) -> Augmentation:
    settings = {"rrc": {"enabled": False}, "num_crops": 1, **PLAIN, **given}
    return Augmentation(**settings)


def one_view(images: Tensor, **given: Any) -> tuple[Tensor, Draws]:
    """The only view, in [0, 1], and its draws."""
    augment = BatchAugment("custom", [augmentation(**given)], *images.shape[-2:], 5)
    draws = augment.draw(0, np.arange(len(images)))
    return augment(images, draws)[0], draws[0]


@pytest.mark.parametrize(
    ("height", "width", "size"), [(32, 32, 32), (96, 96, 32), (20, 28, 48), (48, 30, 24)]
)
def test_crops(height: int, width: int, size: int) -> None:
    """Of any place and size, mirrored or not: v2's float bicubic exactly, PIL's to rounding."""
    generator = torch.Generator().manual_seed(0)
    images = pixels(40, height, width)
    h = torch.randint(1, height + 1, (40,), generator=generator)
    w = torch.randint(1, width + 1, (40,), generator=generator)
    i = (torch.rand(40, generator=generator) * (height - h + 1)).long()
    j = (torch.rand(40, generator=generator) * (width - w + 1)).long()
    flip = torch.arange(40) % 2
    rows = AxisResampler(bicubic_matrices(height, size), mirrored=False)(i, h)
    columns = AxisResampler(bicubic_matrices(width, size), mirrored=True)(j, w, flip)
    views = resample(images.float(), rows, columns)
    for n in range(40):
        box = [int(v[n]) for v in (i, j, h, w)]
        part = images[n, :, box[0] : box[0] + box[2], box[1] : box[1] + box[3]]
        expected = F.resize_image(
            part.float(), [size, size], InterpolationMode.BICUBIC, antialias=True
        )
        by_pil = T.resized_crop(pil(images[n]), *box, [size, size], InterpolationMode.BICUBIC)
        if flip[n]:
            expected, by_pil = expected.flip(-1), T.hflip(by_pil)
        torch.testing.assert_close(views[n], expected, atol=2e-3, rtol=0)
        rounded = views[n].clamp(0, 255)
        difference = (rounded - torch.from_numpy(np.array(by_pil)).permute(2, 0, 1)).abs()
        # PIL rounds, and cuts off, after each of two passes.
        assert difference.mean() < 0.6
        assert (difference > 1.5).float().mean() < 0.02


@pytest.mark.parametrize("sides", [(32, 32), (32, 35), (40, 32), (25, 60), (97, 64)])
def test_whole_images(sides: tuple[int, int]) -> None:
    """Without crops: `Resize` and `CenterCrop`, rounding of odd margins included."""
    images = pixels(3, *sides)
    views, _ = one_view(images, crop_size=32)
    expected = torch.stack(
        [pretrain_transform("custom", [augmentation(crop_size=32)])(pil(i))[0] for i in images]
    )
    assert (views - expected).abs().max() < (1e-6 if sides == (32, 32) else 2.6 / 255)


OPERATIONS = (T.adjust_brightness, T.adjust_contrast, T.adjust_saturation, T.adjust_hue)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_jitter_in_every_order(order: tuple[int, ...]) -> None:
    """Against torchvision's functions on float tensors, each with its own factors."""
    images = pixels(8, 16, 16).float() / 255
    generator = torch.Generator().manual_seed(1)
    factors = 0.2 + 1.6 * torch.rand(8, 3, generator=generator)
    hue = torch.rand(8, generator=generator) - 0.5
    expected = images.clone()
    for operation in order:
        for n in range(8):
            value = hue[n] if operation == 3 else factors[n, operation]
            expected[n] = OPERATIONS[operation](expected[n], float(value))
    steps = [o for o in order if o != 3]
    f = factors[:, steps]
    kinds = torch.tensor(steps)
    affine = torch.stack((f, (1 - f) * (kinds == 2), (1 - f) * (kinds == 1)), 2)
    place = order.index(3)
    stops = [0] * (place + 1) + [8] * (4 - place)
    found = jitter_(images.clone(), affine, hue, stops)
    # torchvision's weights of grey are 0.2989, 0.587, 0.114 on tensors.
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def test_hue_exactly() -> None:
    """Every corner of the sectors, grey, black and white included."""
    levels = torch.tensor([0.0, 0.25, 0.5, 1.0])
    cube = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, 8, 8)
    turns = torch.linspace(-0.5, 0.5, 41)
    expected = torch.cat([T.adjust_hue(cube, float(t)) for t in turns])
    found = shift_hue_(cube.repeat(41, 1, 1, 1), turns)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("radius", [0.1, 0.3, 0.7, 1.0, 1.4, 1.9, 2.0])
def test_blur(radius: float) -> None:
    images = pixels(4, 24, 40)
    found = blur(images.float() / 255, torch.full((4,), radius))
    expected = unit([pil(i).filter(ImageFilter.GaussianBlur(radius)) for i in images])
    difference = (found - expected).abs() * 255
    # PIL rounds after each of six passes.
    assert difference.max() < 3
    assert difference.mean() < 1


def test_blur_matrices() -> None:
    """Against three passes of a box with fractional ends, neighbour by neighbour."""
    radii = torch.tensor([0.1, 0.6, 1.3, 2.0, 6.0], dtype=torch.float64)
    line = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for radius, matrix in zip(radii.tolist(), _blur_matrices(radii, 9), strict=True):
        # The box whose variance is a third of the Gaussian's, found by bisection.
        low, high = 0.0, 20.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if box_variance(middle) < radius**2 / 3 else (low, middle)
        whole, part = int(low), low - int(low)
        blurred = line
        for _ in range(3):
            padded = torch.cat([line[:1] * 0 + blurred[0]] * 30 + [blurred] + [blurred[-1:]] * 30)
            taken = [
                padded[30 + p - whole : 30 + p + whole + 1].sum()
                + part * (padded[29 + p - whole] + padded[31 + p + whole])
                for p in range(9)
            ]
            blurred = torch.stack(taken) / (2 * low + 1)
        torch.testing.assert_close(matrix @ line, blurred, atol=1e-9, rtol=0)


def box_variance(radius: float) -> float:
    """Of a box with `radius` whole pixels on either side and fractional ends."""
    whole, part = int(radius), radius - int(radius)
    squares = 2 * sum(d * d for d in range(1, whole + 1)) + 2 * part * (whole + 1) ** 2
    return squares / (2 * radius + 1)


def test_blurred_with_its_own_radius() -> None:
    images = pixels(30, 16, 16)
    views, draws = one_view(images, crop_size=16, gaussian_blur={"prob": 0.5})
    radii = torch.from_numpy(draws[:, RADIUS])
    assert 5 < radii.count_nonzero() < 25
    for image, radius, view in zip(images, radii, views, strict=True):
        whole = image.unsqueeze(0).float() / 255
        expected = blur(whole, radius.view(1)) if radius else whole
        torch.testing.assert_close(view, expected[0])


@pytest.mark.parametrize(
    ("name", "operation", "bound"),
    [
        ("solarization", lambda i: ImageOps.solarize(i, 128), 1e-6),
        ("equalization", ImageOps.equalize, 1e-6),
        ("grayscale", lambda i: T.to_grayscale(i, 3), 1 / 255),
        ("horizontal_flip", ImageOps.mirror, 1e-6),
    ],
)
def test_applied_to_the_drawn(name: str, operation: Any, bound: float) -> None:
    images = pixels(60, 16, 16)
    views, draws = one_view(images, crop_size=16, **{name: {"prob": 0.5}})
    columns = {"solarization": SOLARIZED, "equalization": EQUALIZED, "grayscale": GRAY}
    told = draws[:, columns.get(name, FLIP)]
    assert 10 < told.sum() < 50
    for image, applied, view in zip(images, told, views, strict=True):
        expected = T.to_tensor(operation(pil(image)) if applied else pil(image))
        assert (view - expected).abs().max() <= bound


def test_grey_comes_before_what_is_not_linear() -> None:
    images = pixels(12, 16, 16)
    always = {name: {"prob": 1.0} for name in ("grayscale", "equalization", "solarization")}
    views, _ = one_view(images, crop_size=16, **always)
    transform = pretrain_transform("custom", [augmentation(crop_size=16, **always)])
    expected = torch.stack([transform(pil(i))[0] for i in images])
    # Grey of 8 bits against grey that equalisation rounds.
    assert ((views - expected).abs() > 1.5 / 255).float().mean() < 0.02
