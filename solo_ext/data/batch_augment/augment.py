"""Augmentation of a whole batch on the device that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as F

from solo_ext.config.schema import Augmentation
from solo_ext.core.draws import sample_keys
from solo_ext.core.errors import ConfigError
from solo_ext.data.batch_augment.draws import ViewDraws, draw_view
from solo_ext.data.batch_augment.ops import (
    AxisResampler,
    bicubic_matrices,
    blur,
    central_matrix,
    jitter_,
    kernel_bytes,
    mix_channels,
    resample,
    towards_grey,
)
from solo_ext.data.transforms import statistics

MEMORY_BOUND = 4 << 30
"""Limit in bytes of the crop matrices of all entries of ``augmentations`` together."""
_CACHED_BYTES = 1 << 20
"""Bytes of crops per chunk on the CPU: several such arrays fit in its cache."""


class BatchAugment(nn.Module):
    """Makes all crops of a batch of uint8 images, in the order of the config's ``augmentations``.

    Distributions are those of :func:`solo_ext.data.transforms.pretrain_transform`, without its
    rounding to 8 bits between steps. :meth:`draw` draws all parameters on the CPU, from (seed,
    epoch, index) alone; :meth:`forward` computes on the images' device.

    Args:
        dataset: ``data.dataset``, which determines mean and deviation.
        augmentations: the config's list of pipelines.
        height: of the images.
        width: of the images.
        seed: seed of the run.

    Raises:
        ConfigError: the matrices of its crops would take too much memory.

    >>> pipeline = Augmentation(crop_size=8, num_crops=2)
    >>> augment = BatchAugment("custom", [pipeline], height=12, width=12, seed=5)
    >>> draws = augment.draw(epoch=0, indices=np.arange(4))
    >>> views = augment(torch.zeros(4, 3, 12, 12, dtype=torch.uint8), draws)
    >>> [tuple(view.shape) for view in views]
    [(4, 3, 8, 8), (4, 3, 8, 8)]
    """

    def __init__(
        self,
        dataset: str,
        augmentations: Sequence[Augmentation],
        height: int,
        width: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.augmentations, self.seed = augmentations, seed
        self.height, self.width = height, width
        _check_memory(augmentations, height, width)
        self.makers = nn.ModuleList(
            ViewMaker(a, *statistics(dataset, a), height, width) for a in augmentations
        )

    def draw(self, epoch: int, indices: NDArray[np.int64]) -> list[ViewDraws]:
        """Draws the parameters of every view of some samples, one entry per crop.

        Args:
            epoch: from 0.
            indices: the samples (N,).
        """
        keys = sample_keys(self.seed, epoch, indices)
        return [
            draw_view(a, keys, number, self.height, self.width)
            for number, (a, _) in enumerate(self._views())
        ]

    def forward(self, images: Tensor, draws: Sequence[ViewDraws]) -> list[Tensor]:
        """Computes the crops.

        Args:
            images: (N, 3, H, W), uint8.
            draws: their parameters from :meth:`draw`, on the images' device.

        Returns:
            Normalised crops (N, 3, S, S), float32.
        """
        return [
            maker(images, drawn) for (_, maker), drawn in zip(self._views(), draws, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"from {self.height} x {self.width}, seed {self.seed}"

    def _views(self) -> Iterator[tuple[Augmentation, nn.Module]]:
        for augmentation, maker in zip(self.augmentations, self.makers, strict=True):
            for _ in range(augmentation.num_crops):
                yield augmentation, maker


def _check_memory(augmentations: Sequence[Augmentation], height: int, width: int) -> None:
    taken = sum(
        kernel_bytes(height, a.crop_size, False)
        + kernel_bytes(width, a.crop_size, a.horizontal_flip.prob > 0)
        for a in augmentations
    )
    if taken > MEMORY_BOUND:
        raise ConfigError(
            "data.augmentation",
            "batch",
            f"for crops of {width} x {height} pixels it holds matrices of {taken / 2**30:.1f} GiB, "
            f"the bound is {MEMORY_BOUND / 2**30:.0f} GiB",
            "take image, or scale the images down beforehand",
        )


class ViewMaker(nn.Module):
    """Makes one crop: jitter, grey, blur, solarisation, equalisation, mirroring, normalisation.

    Args:
        augmentation: the entry.
        mean: per channel.
        std: per channel.
        height: of the images.
        width: of the images.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        augmentation: Augmentation,
        mean: Sequence[float],
        std: Sequence[float],
        height: int,
        width: int,
    ) -> None:
        super().__init__()
        self.size = augmentation.crop_size
        self.augmentation = augmentation
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        crops = augmentation.rrc.enabled
        mirrored = augmentation.horizontal_flip.prob > 0
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
        return str(self.augmentation)

    def forward(self, images: Tensor, draws: ViewDraws) -> Tensor:
        """Normalised crops (N, 3, S, S) of uint8 images (N, 3, H, W)."""
        n = len(images)
        shape = (n, 3, self.size, self.size)
        views = torch.empty(shape, dtype=torch.float32, device=images.device)
        # Chunks help a CPU's cache; on a GPU they would only add kernel launches.
        step = self._chunk if images.device.type == "cpu" else n
        for start in range(0, n, step):
            drawn = draws if step >= n else draws.part(start, min(start + step, n))
            views.index_copy_(0, drawn.rows, self._rows(images.index_select(0, drawn.rows), drawn))
        return views

    def _rows(self, images: Tensor, drawn: ViewDraws) -> Tensor:
        top, left, height, width = drawn.box.unbind(1)
        rows = self.rows(top, height) / 255
        columns = self.columns(left, width, drawn.flip)
        # Bicubic interpolation overshoots: clip, as is done for 8-bit images.
        x = resample(images.float(), rows, columns).clamp_(0, 1)
        jitter_(x, drawn.affine, drawn.hue, drawn.hue_stops)
        grey = towards_grey(1 - drawn.gray, drawn.gray)
        # Grey is linear in the channels, so it can share one product with the normalisation,
        # unless a non-linear step comes between them.
        early = self.augmentation.solarization.prob or self.augmentation.equalization.prob
        if early:
            x = mix_channels(x, grey, torch.zeros(1, 1, device=x.device))
        x = _changed(x, drawn.blurred, lambda part: blur(part, drawn.radius))
        # Solarise above 128 of 255, where x and 1 - x meet.
        x = _changed(x, drawn.solarized, lambda part: torch.minimum(part, 1 - part))
        x = _changed(x, drawn.equalized, _equalized)
        scale = torch.diag_embed(1 / self.std)
        last = scale.expand(len(x), 3, 3) if early else scale @ grey
        return mix_channels(x, last, -self.mean / self.std)


def _changed(x: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return x.index_copy_(0, rows, change(x.index_select(0, rows))) if len(rows) else x


def _equalized(x: Tensor) -> Tensor:
    pixels = (x * 255).round_().to(torch.uint8)
    return cast(Tensor, F.equalize_image(pixels)).float() / 255
