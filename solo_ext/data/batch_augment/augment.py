"""Augmentation of a whole batch on the device that trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from solo_ext.core.draws import sample_keys
from solo_ext.core.errors import ConfigError
from solo_ext.data.batch_augment.crop import kernel_bytes
from solo_ext.data.batch_augment.draws import ViewDraws, draw_view
from solo_ext.data.batch_augment.view import ViewMaker
from solo_ext.data.transforms import statistics

MEMORY_BOUND = 4 << 30
"""Largest matrices, in bytes, that all entries of ``augmentations`` may have."""


class BatchAugment(nn.Module):
    """All crops of a batch of uint8 images, in the order of the config's ``augmentations``.

    Distributions are those of :func:`solo_ext.data.transforms.pretrain_transform`; nothing is
    rounded to 8 bits in between. What chance decides is a function of (seed, epoch, index), drawn
    on the CPU by :meth:`draw`; :meth:`forward` computes where the images are.

    Args:
        dataset: ``data.dataset``, which names the statistics.
        augmentations: the config's list of pipelines, defaults filled in.
        height: of the images.
        width: of the images.
        seed: seed of the run.

    Raises:
        ConfigError: the matrices of its crops would take too much memory.
    """

    def __init__(
        self,
        dataset: str,
        augmentations: Sequence[Mapping[str, Any]],
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
        """The parameters of every view of some samples, one entry per crop.

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
            draws: what :meth:`draw` gave for them, on their device.

        Returns:
            Normalised crops (N, 3, S, S), float32.
        """
        return [
            maker(images, drawn) for (_, maker), drawn in zip(self._views(), draws, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"from {self.height} x {self.width}, seed {self.seed}"

    def _views(self) -> Iterator[tuple[Mapping[str, Any], nn.Module]]:
        for augmentation, maker in zip(self.augmentations, self.makers, strict=True):
            for _ in range(augmentation["num_crops"]):
                yield augmentation, maker


def _check_memory(augmentations: Sequence[Mapping[str, Any]], height: int, width: int) -> None:
    taken = sum(
        kernel_bytes(height, a["crop_size"], False)
        + kernel_bytes(width, a["crop_size"], a["horizontal_flip"]["prob"] > 0)
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
