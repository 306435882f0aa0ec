"""The Triton kernel that makes views, against torch's operations with the same draws."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from solo_ext.config.schema import Augmentation
from solo_ext.data import batch_augment
from solo_ext.data.batch_augment import LARGEST_FUSED, BatchAugment
from solo_ext.data.batch_draws import FLIP, GRAY, NO_JITTER, PLACE, RADIUS, SOLARIZED, Draws

pytest.importorskip("triton", reason="this build of torch comes without Triton")

CUDA = torch.cuda.is_available()
# Under Triton's interpreter each image takes its time.
IMAGES = 6 if CUDA else 3
NORMAL: dict[str, Any] = {"mean": [0.4, 0.5, 0.6], "std": [0.8, 1.0, 0.9]}
"""Deviations that leave differences about as large as they are in [0, 1]."""
JITTER = {"prob": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
ALL: dict[str, Any] = {
    "color_jitter": JITTER,
    "grayscale": {"prob": 0.3},
    "gaussian_blur": {"prob": 0.5},
    "solarization": {"prob": 0.3},
    "horizontal_flip": {"prob": 0.5},
}
WHOLE: dict[str, Any] = {"rrc": {"enabled": False}}


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel runs, on a CPU under Triton's interpreter."""
    monkeypatch.setattr(batch_augment, "_has_triton", lambda images: True)
    return


def both_forms(
    height: int, width: int, size: int, epoch: int, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> tuple[Tensor, Tensor, Draws]:
    """Views by torch's operations on the CPU, by the kernel, and what was drawn for them."""
    generator = torch.Generator().manual_seed(0)
    shape = IMAGES, 3, height, width
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    augment = BatchAugment(
        "custom", [Augmentation(crop_size=size, num_crops=2, **NORMAL, **given)], height, width, 5
    )
    draws = augment.draw(epoch, np.arange(IMAGES))
    plain = torch.stack(augment(images, draws))
    with monkeypatch.context() as patch:
        patch.setattr(batch_augment, "_has_triton", lambda images: True)
        device = "cuda" if CUDA else "cpu"
        fused = torch.stack(augment.to(device)(images.to(device), draws)).cpu()
    return plain, fused, draws


slow = partial(pytest.param, marks=pytest.mark.slow)
only_cuda = pytest.mark.skipif(not CUDA, reason="no CUDA device")
# Of sizes in the order of those of another case.
on_gpu = partial(pytest.param, marks=[pytest.mark.slow, only_cuda])


# Of epochs in which few images meet all that can be drawn; another one for each case.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("height", "width", "size", "epoch", "given"),
    [
        (40, 30, 24, 23, ALL),
        on_gpu(32, 32, 32, 24, ALL),
        slow(40, 30, 24, 24, ALL | WHOLE),
        slow(96, 96, 96, 28, ALL),
        on_gpu(96, 64, 40, 28, ALL),
        slow(8, 8, 30, 35, ALL),
        slow(32, 35, 32, 54, ALL | WHOLE),
        slow(32, 32, 32, 3, {"color_jitter": {"prob": 1.0, "hue": 0.5}}),
        slow(32, 32, 32, 3, {"color_jitter": {"prob": 1.0, "contrast": 0.9, "saturation": 0.9}}),
        slow(3, 3, 3, 3, {"gaussian_blur": {"prob": 1.0}}),
        slow(32, 32, 32, 3, {"rrc": {"crop_min_scale": 0.001, "crop_max_scale": 0.01}}),
    ],
)
def test_both_forms_agree(
    height: int,
    width: int,
    size: int,
    epoch: int,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, fused, draws = both_forms(height, width, size, epoch, monkeypatch, **given)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=0)
    if given.keys() >= ALL.keys():
        assert {*draws[..., PLACE].flat} == {*range(NO_JITTER + 1)}
        for column in (FLIP, GRAY, RADIUS, SOLARIZED):
            assert 0 < np.count_nonzero(draws[..., column]) < draws[..., column].size


@pytest.mark.matrix
def test_every_draw_changes_the_kernel_s_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the comparison above is about what it says."""
    _, unchanged, _ = both_forms(32, 32, 32, 23, monkeypatch)
    for name, settings in ALL.items():
        _, fused, _ = both_forms(32, 32, 32, 23, monkeypatch, **{name: settings})
        share = float((fused != unchanged).flatten(2).any(2).float().mean())
        assert 0.1 < share < 0.95, name


class _Counted(TorchDispatchMode):
    """Names of the operations that work on a device: no views, no room, nothing of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if not (func.is_view or "empty" in name or name == "aten::detach"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("forced")
@pytest.mark.skipif(CUDA, reason="counted under the interpreter")
def test_launches() -> None:
    """One for each view; what the interpreter itself does in torch is not counted."""
    large = Augmentation(crop_size=16, num_crops=2, **ALL)
    small = Augmentation(crop_size=8, num_crops=3, **ALL)
    augment = BatchAugment("custom", [large, small], 16, 16, 5)
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with _Counted() as counted:
        augment(images, augment.draw(0, np.arange(1)))
    assert counted.names == ["solo_ext::fused_crops"] * 5


@pytest.mark.parametrize(
    ("side", "given", "expected"),
    [
        (LARGEST_FUSED, {}, True),
        (LARGEST_FUSED + 1, {}, False),
        (32, {"equalization": {"prob": 0.1}}, False),
    ],
)
@pytest.mark.usefixtures("forced")
def test_which_views_it_makes(side: int, given: dict[str, Any], expected: bool) -> None:
    """A histogram, as equalising takes, is beyond it."""
    augment = BatchAugment(
        "custom", [Augmentation(crop_size=32, num_crops=1, **given)], side, side, 5
    )
    images = torch.zeros(1, 3, side, side, dtype=torch.uint8)
    assert [maker.has_fused(images) for maker in augment._views()] == [expected]


@pytest.mark.gpu
@only_cuda
@pytest.mark.parametrize("side", [32, LARGEST_FUSED + 4])
def test_nothing_waits_for_the_gpu(side: int) -> None:
    augment = BatchAugment(
        "custom", [Augmentation(crop_size=32, num_crops=2, **ALL)], side, side, 5
    ).cuda()
    images = torch.zeros(8, 3, side, side, dtype=torch.uint8, device="cuda")
    draws = augment.draw(0, np.arange(8))
    augment(images, draws)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        augment(images, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
