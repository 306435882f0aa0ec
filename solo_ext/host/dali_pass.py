"""One pass over training files through the pipeline of a host, and the reader that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from solo_ext.data.dali import nvidia_dali

_DEVICE_PADDING, _HOST_PADDING = 211025920, 140544512
"""Memory that both hosts set aside for decoding on the GPU, so that none is claimed later."""


@dataclass(frozen=True)
class DALIPass:
    """What a host's pipeline is made of.

    Attributes:
        files: to read, in order.
        numbers: a whole number for every file: its sample index, or its target.
        targets: target of every sample index; ``None`` where ``numbers`` are targets.
        dataset: ``data.dataset``.
        augmentations: the config's list of pipelines.
        large: crops of the first entry's size; small: the others.
        batch_size: files per batch.
        num_threads: at least 1.
        device: ``cpu`` or ``gpu``.
        device_id: the GPU, ``None`` on the CPU.
        rank: of this process.
        seed: of the augmentation.
    """

    files: Sequence[str]
    numbers: Sequence[int]
    targets: Sequence[int] | None
    dataset: str
    augmentations: Sequence[Mapping[str, Any]]
    large: int
    small: int
    batch_size: int
    num_threads: int
    device: str
    device_id: int | None
    rank: int
    seed: int

    @property
    def output_map(self) -> list[str]:
        """Names of a pipeline's outputs, as both hosts name them."""
        large = [f"large{number}" for number in range(self.large)]
        return [*large, *(f"small{number}" for number in range(self.small)), "label"]

    def wrapper_arguments(self, pipeline: Any) -> dict[str, Any]:
        """Arguments of either host's ``PretrainWrapper``."""
        device = torch.device("cpu" if self.device_id is None else f"cuda:{self.device_id}")
        return {
            "model_batch_size": self.batch_size,
            "model_rank": self.rank,
            "model_device": device,
            "conversion_map": self.targets,
            "pipelines": pipeline,
            "output_map": self.output_map,
            "reader_name": "Reader",
            "last_batch_policy": nvidia_dali().plugin.pytorch.LastBatchPolicy.DROP,
            "auto_reset": True,
        }


def open_reader(
    pipeline: Any, files: Sequence[str], numbers: Sequence[int], device: str, **reader: Any
) -> None:
    """Sets ``reader``, ``decode`` and ``to_int64``, which the graphs of both hosts call.

    The hosts open what lies in the folders, whether it is an image or not, and number a fraction
    in an order of their own.

    Args:
        pipeline: of a host, or its builder.
        files: to read.
        numbers: of the files.
        device: ``cpu`` or ``gpu``.
        reader: further arguments of ``readers.File``.
    """
    ops, types = nvidia_dali().ops, nvidia_dali().types
    on_gpu = device == "gpu"
    pipeline.reader = ops.readers.File(files=list(files), labels=list(numbers), **reader)
    pipeline.decode = ops.decoders.Image(
        device="mixed" if on_gpu else "cpu",
        output_type=types.RGB,
        device_memory_padding=_DEVICE_PADDING if on_gpu else 0,
        host_memory_padding=_HOST_PADDING if on_gpu else 0,
        # As Pillow decodes: unrotated, chroma interpolated.
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
    )
    pipeline.to_int64 = ops.Cast(dtype=types.INT64, device=device)
