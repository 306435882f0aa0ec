"""The training loader of ``data.format=dali``: solo-learn's pipelines, in our order of samples."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from solo_ext.config.schema import DALI, RunConfig
from solo_ext.core import distributed
from solo_ext.core.draws import derive_seed
from solo_ext.core.errors import ConfigError
from solo_ext.data.dali import device_of, nvidia_dali, unreadable
from solo_ext.data.images import files_of
from solo_ext.data.loaders import StatefulLoader, epoch_sampler
from solo_ext.data.reading import Images, targets_of
from solo_ext.data.views import TrainingViews

FILES_ONLY = ("custom", "imagenet", "imagenet100")
_DEVICE_PADDING, _HOST_PADDING = 211025920, 140544512
"""Bytes that solo-learn reserves for decoding on the GPU, so that none are allocated later."""


def open_reader(
    pipeline: Any, files: Sequence[str], numbers: Sequence[int], device: str, **reader: Any
) -> None:
    """Sets the operators ``reader``, ``decode`` and ``to_int64`` that the graphs of both hosts use.

    The hosts' own readers open every file in the folders, image or not, and number the files
    differently if only a fraction is used. ``reader`` are further arguments of ``readers.File``.
    """
    ops, types = nvidia_dali().ops, nvidia_dali().types
    on_gpu = device == "gpu"
    pipeline.reader = ops.readers.File(files=list(files), labels=list(numbers), **reader)
    pipeline.decode = ops.decoders.Image(
        device="mixed" if on_gpu else "cpu",
        output_type=types.RGB,
        device_memory_padding=_DEVICE_PADDING if on_gpu else 0,
        host_memory_padding=_HOST_PADDING if on_gpu else 0,
        # These two make DALI decode as Pillow does: not rotated, with chroma interpolated.
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
    )
    pipeline.to_int64 = ops.Cast(dtype=types.INT64, device=device)


class DALILoader(StatefulLoader):
    """Batches ``[indices, [crops], targets]`` through the host's own DALI pipeline.

    The ordinary loader's seed, epoch and rank decide which images a batch holds; DALI draws the
    augmentation from (seed, epoch, rank). Every epoch has a new pipeline, so an epoch is the same
    whether or not the run was interrupted before. To resume within an epoch, its first batches are
    decoded and dropped.

    Raises:
        ConfigError: the data set has no image files.
        UserError: while iterating, a file cannot be read.
    """

    def __init__(self, run: RunConfig, images: Images) -> None:
        self.run = run
        self.batch_size = run.optimizer.batch_size
        self.sampler = epoch_sampler(run, images)
        self.start_at(self.sampler, self.batch_size)
        self.files, self.targets = files_of(images), [int(t) for t in targets_of(images)]
        self.dataset = TrainingViews(images)
        dali = run.dali or DALI()
        self.encoded, self.device = dali.encode_indexes_into_labels, dali.device

    def __repr__(self) -> str:
        return str(_pipelines().transforms(self.run))

    def __iter__(self) -> Iterator[list[Tensor | list[Tensor]]]:
        yield from self.counted(self._batches())

    def _batches(self) -> Iterator[Any]:
        skipped, self.order.start = self.order.start // self.batch_size, 0
        indices = [key.sample for key in self.order][: len(self) * self.batch_size]
        self.order.start = skipped * self.batch_size
        done = 0
        try:
            # Creating the iterator already reads the first batch, so it can fail like the loop.
            for batch in _pipelines().batches(self, indices):
                done += 1
                if done > skipped:
                    yield batch
        except RuntimeError as error:
            unread = [self.files[index] for index in indices[done * self.batch_size :]]
            raise unreadable(error, unread, self.batch_size) from error

    def read(self, indices: Sequence[int]) -> tuple[list[str], Sequence[int]]:
        """Files of some samples, and the index or target that the pipeline returns for each."""
        numbers = indices if self.encoded else [self.targets[index] for index in indices]
        return [self.files[index] for index in indices], numbers

    @property
    def pipeline_arguments(self) -> dict[str, Any]:
        """Arguments of a host's pipeline for the current epoch."""
        rank = distributed.rank()
        return {
            "batch_size": self.batch_size,
            "num_threads": max(self.run.data.num_workers, 1),
            "device_id": torch.cuda.current_device() if self.device == "gpu" else None,
            "seed": derive_seed(self.run.seed, self.order.epoch, rank) % 2**31,
        }

    def wrapper_arguments(self, pipeline: Any) -> dict[str, Any]:
        """Arguments of ``PretrainWrapper``, the same for both hosts."""
        data = self.run.data
        device = f"cuda:{torch.cuda.current_device()}" if self.device == "gpu" else "cpu"
        large = [f"large{number}" for number in range(data.num_large_crops or 0)]
        small = [f"small{number}" for number in range(data.num_small_crops or 0)]
        return {
            "model_batch_size": self.batch_size,
            "model_rank": distributed.rank(),
            "model_device": torch.device(device),
            "conversion_map": self.targets if self.encoded else None,
            "pipelines": pipeline,
            "output_map": [*large, *small, "label"],
            "reader_name": "Reader",
            "last_batch_policy": nvidia_dali().plugin.pytorch.LastBatchPolicy.DROP,
            "auto_reset": True,
        }


def check_dali(run: RunConfig) -> None:
    """Refuses settings that the DALI pipelines of the hosts do not support.

    Raises:
        ConfigError: DALI is not installed, or the config asks for one of torchvision's data sets,
            for equalisation, or for skipping unreadable images.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> check_dali(check_run(compose("digits/simclr", ["data.unreadable=skip"])))
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.unreadable='skip': DALI stops at an image tha...
    """
    device_of(run)
    if run.data.dataset not in FILES_ONLY:
        problem = "DALI reads image files, not torchvision's archives"
        remedy = "unpack it into class folders with data.dataset=custom"
        other = "or use data.format=image_folder"
        raise ConfigError("data.dataset", run.data.dataset, problem, f"{remedy}, {other}")
    for place, augmentation in enumerate(run.augmentations):
        if chance := augmentation.equalization.prob:
            key = f"augmentations.{place}.equalization.prob"
            remedy = "set it to 0, or use data.format=image_folder"
            raise ConfigError(key, chance, "DALI has no equalisation", remedy)


def _pipelines() -> Any:
    """The module that holds the installed host's ``batches`` and ``transforms``."""
    # Import by name, because the package itself imports modules of this folder.
    main = importlib.import_module("solo_ext.host").load().info.generation == "main"
    return importlib.import_module(
        "solo_ext.host.dali_main" if main else "solo_ext.host.release_1_0_2.dali"
    )
