"""The module as a whole: the same views whatever else is in the batch, and wherever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from solo_ext.config.schema import Augmentation
from solo_ext.data.batch_augment import BatchAugment
from solo_ext.data.transforms import pretrain_transform

SIDE, COUNT = 20, 50
EVERYTHING: dict[str, Any] = {
    name: {"prob": 0.4}
    for name in ("grayscale", "gaussian_blur", "solarization", "equalization", "horizontal_flip")
}
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
EVERYTHING["color_jitter"] = {"prob": 0.8, **JITTER}


@pytest.fixture(scope="module")
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (COUNT, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)


def module(**changes: Any) -> BatchAugment:
    large = Augmentation(crop_size=16, num_crops=2, **{**EVERYTHING, **changes})
    small = Augmentation(crop_size=8, num_crops=3, **{**EVERYTHING, **changes})
    return BatchAugment("custom", [large, small], SIDE, SIDE, 5)


def views(
    augment: BatchAugment, images: Tensor, samples: list[int], epoch: int = 3
) -> list[Tensor]:
    return augment(images[samples], augment.draw(epoch, np.array(samples)))


@pytest.mark.parametrize("solarized", [0.0, 0.4])
def test_views_do_not_depend_on_the_batch(images: Tensor, solarized: float) -> None:
    """Nor on its order, nor on how it is cut into chunks."""
    augment = module(solarization={"prob": solarized}, equalization={"prob": solarized})
    whole = views(augment, images, list(range(COUNT)))
    some = [41, 3, 17, 8, 30, 0]
    for given in (some, some[::-1], some[:1], some * 40):
        for part, all_views in zip(views(augment, images, given), whole, strict=True):
            # A matrix product may round differently in another batch.
            torch.testing.assert_close(part, all_views[given], atol=2e-5, rtol=0)


def test_epochs_and_seeds_differ(images: Tensor) -> None:
    samples = list(range(COUNT))
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
    drawn = augment.draw(0, np.arange(6))
    moved = [type(d)(*(v.to("meta") if isinstance(v, Tensor) else v for v in d)) for d in drawn]
    pixels = torch.empty(6, 3, SIDE, SIDE, dtype=torch.uint8, device="meta")
    assert [v.shape[-1] for v in augment.to("meta")(pixels, moved)] == [16, 16, 8, 8, 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(images: Tensor) -> None:
    """The same views, without a wait for the device."""
    augment = module()
    expected = views(augment, images, list(range(COUNT)))
    drawn = augment.draw(3, np.arange(COUNT))
    moved = [type(d)(*(v.cuda() if isinstance(v, Tensor) else v for v in d)) for d in drawn]
    augment.cuda()
    pixels = images.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = augment(pixels, moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, expected, strict=True):
        # Equalisation rounds to 8 bits, where a last bit may tip.
        assert ((ours.cpu() - theirs).abs() > 1e-4).float().mean() < 0.01
