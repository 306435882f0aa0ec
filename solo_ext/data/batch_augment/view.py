"""One entry of ``augmentations`` on a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as F

from solo_ext.data.batch_augment.blur import blur
from solo_ext.data.batch_augment.colour import jitter_, mix_channels, towards_grey
from solo_ext.data.batch_augment.crop import (
    AxisResampler,
    bicubic_matrices,
    central_matrix,
    resample,
)
from solo_ext.data.batch_augment.draws import ViewDraws

_CACHED_BYTES = 1 << 20
"""Crops of a chunk on the CPU, as float32: several such arrays fit its cache."""


class ViewMaker(nn.Module):
    """Crop, jitter, grey, blur, solarisation, equalisation, mirroring and normalisation.

    Args:
        augmentation: the entry, defaults filled in.
        mean: per channel.
        std: per channel.
        height: of the images.
        width: of the images.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        augmentation: Mapping[str, Any],
        mean: Sequence[float],
        std: Sequence[float],
        height: int,
        width: int,
    ) -> None:
        super().__init__()
        self.size = augmentation["crop_size"]
        self.augmentation = augmentation
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        crops = augmentation["rrc"]["enabled"]
        mirrored = augmentation["horizontal_flip"]["prob"] > 0
        sides = (height, width)
        self.rows, self.columns = (
            AxisResampler(
                bicubic_matrices(source, self.size)
                if crops
                else central_matrix(source, min(sides), self.size),
                mirrored=mirrored and source_is_width,
            )
            for source, source_is_width in ((height, False), (width, True))
        )
        self._chunk = max(16, _CACHED_BYTES // (12 * self.size**2))

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.augmentation.items())

    def forward(self, images: Tensor, draws: ViewDraws) -> Tensor:
        """Normalised crops (N, 3, S, S) of uint8 images (N, 3, H, W)."""
        n = len(images)
        shape = (n, 3, self.size, self.size)
        views = torch.empty(shape, dtype=torch.float32, device=images.device)
        # On a GPU small pieces would cost more than they save.
        step = self._chunk if images.device.type == "cpu" else n
        for start in range(0, n, step):
            drawn = draws if step >= n else draws.part(start, min(start + step, n))
            views.index_copy_(0, drawn.rows, self._rows(images.index_select(0, drawn.rows), drawn))
        return views

    def _rows(self, images: Tensor, drawn: ViewDraws) -> Tensor:
        top, left, height, width = drawn.box.unbind(1)
        rows = self.rows(top, height) / 255
        columns = self.columns(left, width, drawn.flip)
        # As in 8 bits, what the kernel overshoots is cut off.
        x = resample(images.float(), rows, columns).clamp_(0, 1)
        jitter_(x, drawn.affine, drawn.hue, drawn.hue_stops)
        grey = towards_grey(1 - drawn.gray, drawn.gray)
        # What is linear in the channels can wait for the normalisation, except for these.
        early = self._has("solarization") or self._has("equalization")
        if early:
            x = mix_channels(x, grey, torch.zeros(1, 1, device=x.device))
        x = _changed(x, drawn.blurred, lambda part: blur(part, drawn.radius))
        # At 128 of 255, where both branches meet.
        x = _changed(x, drawn.solarized, lambda part: torch.minimum(part, 1 - part))
        x = _changed(x, drawn.equalized, _equalized)
        scale = torch.diag_embed(1 / self.std)
        last = scale.expand(len(x), 3, 3) if early else scale @ grey
        return mix_channels(x, last, -self.mean / self.std)

    def _has(self, name: str) -> bool:
        return bool(self.augmentation[name]["prob"] > 0)


def _changed(x: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return x.index_copy_(0, rows, change(x.index_select(0, rows))) if len(rows) else x


def _equalized(x: Tensor) -> Tensor:
    pixels = (x * 255).round_().to(torch.uint8)
    return cast(Tensor, F.equalize_image(pixels)).float() / 255
