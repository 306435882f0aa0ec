"""Fixed views of images through NVIDIA DALI, for evaluation and the E-step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from solo_ext.data.dali_errors import nvidia_dali, unreadable
from solo_ext.data.transforms import Statistics

_AHEAD = 4
"""Batches that a pipeline may have read when it fails on one."""


class DALIViews:
    """Batches ``(views, labels)`` of files in their order, each once.

    Geometry and normalisation are those of :func:`solo_ext.data.transforms.eval_transform`;
    pixels differ from it by rounding, 0.1 to 0.2 grey levels of 255 on average.

    Args:
        files: image files.
        labels: a whole number for every file.
        size: side of the view in pixels.
        statistics: mean and standard deviation per channel.
        batch_size: files per batch; the last one may be smaller.
        num_threads: at least 1.
        device: ``cpu`` or ``gpu``.

    Attributes:
        skipped: nothing; every file is read or refused.

    Raises:
        UserError: while iterating, a file that cannot be read.
    """

    skipped: Sequence[int] = ()

    def __init__(
        self,
        files: Sequence[str],
        labels: Sequence[int],
        size: int,
        statistics: Statistics,
        *,
        batch_size: int,
        num_threads: int,
        device: str,
    ) -> None:
        self.files, self.labels = list(files), [int(label) for label in labels]
        self.size, self.statistics = size, statistics
        self.batch_size, self.num_threads, self.device = batch_size, max(num_threads, 1), device

    def __len__(self) -> int:
        return -(-len(self.files) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.files:
            return
        plugin = nvidia_dali().plugin.pytorch
        served = 0
        try:
            batches = plugin.DALIGenericIterator(
                self._pipeline(),
                ["views", "labels"],
                reader_name="Reader",
                last_batch_policy=plugin.LastBatchPolicy.PARTIAL,
            )
            for (batch,) in batches:
                yield batch["views"], batch["labels"].flatten().long()
                served += 1
        except RuntimeError as error:
            first = served * self.batch_size
            raise unreadable(error, self.files[first : first + _AHEAD * self.batch_size]) from error

    def _pipeline(self) -> Any:
        dali = nvidia_dali()
        fn, types = dali.fn, dali.types
        on_gpu = self.device == "gpu"
        mean, std = ([255 * value for value in values] for values in self.statistics)

        def graph() -> Any:
            encoded, labels = fn.readers.file(files=self.files, labels=self.labels, name="Reader")
            images = fn.decoders.image(
                encoded,
                device="mixed" if on_gpu else "cpu",
                output_type=types.RGB,
                # As Pillow decodes: unrotated, chroma interpolated.
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,
            )
            views = fn.crop_mirror_normalize(
                _fixed_view(images, self.size),
                dtype=types.FLOAT,
                output_layout="CHW",
                mean=mean,
                std=std,
            )
            return views, labels

        return dali.pipeline_def(graph)(
            batch_size=min(self.batch_size, len(self.files)),
            num_threads=self.num_threads,
            device_id=torch.cuda.current_device() if on_gpu else None,
        )


def _fixed_view(images: Any, size: int) -> Any:
    """The geometry of :class:`solo_ext.data.transforms.FixedView`, in its whole numbers."""
    dali = nvidia_dali()
    fn, types = dali.fn, dali.types
    sides = images.shape(dtype=types.INT32)
    height, width = sides[0], sides[1]
    shorter = dali.math.min(height, width)
    small = fn.cast(shorter <= size, dtype=types.INT32)
    target = small * size + (1 - small) * round(size * 8 / 7)
    scaled = [(target * side) // shorter for side in (height, width)]
    resized = fn.resize(
        images,
        size=fn.stack(*(fn.cast(side, dtype=types.FLOAT) for side in scaled)),
        interp_type=types.INTERP_CUBIC,
    )
    return fn.slice(
        resized, fn.stack(*(_margin(side, size) for side in scaled)), [size, size], axes=(0, 1)
    )


def _margin(side: Any, size: int) -> Any:
    """Half of what is cut off, rounded as Python rounds: halves to the even number."""
    cut = side - size
    half = cut // 2
    return half + (cut - 2 * half) * (half - 2 * (half // 2))
