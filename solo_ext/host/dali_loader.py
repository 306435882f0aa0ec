"""The training loader of ``data.format=dali``: the host's pipelines, in our order."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solo_ext.config.schema import DALI, Augmentation, RunConfig
from solo_ext.core import distributed
from solo_ext.core.draws import mix
from solo_ext.core.errors import ConfigError
from solo_ext.data.dali import device_of, nvidia_dali, unreadable
from solo_ext.data.images import files_of
from solo_ext.data.loaders import StatefulLoader, epoch_sampler
from solo_ext.data.reading import Images, targets_of
from solo_ext.data.transforms import MultiCrop
from solo_ext.data.views import TrainingViews

FILES_ONLY = ("custom", "imagenet", "imagenet100")
_AHEAD = 4
"""Number of batches that a pipeline may have read ahead when it fails on one."""
_DEVICE_PADDING, _HOST_PADDING = 211025920, 140544512
"""Memory that both hosts reserve for decoding on the GPU, so that none is allocated later."""


@dataclass(frozen=True)
class DALIPass:
    """Arguments of a host's pipeline for one pass over ``files``, in order.

    ``numbers`` are the files' sample indices, whose targets are ``targets``, or, where that is
    ``None``, their targets. ``large`` and ``small`` count crops; ``device_id`` is ``None`` on the
    CPU; ``seed`` is that of the augmentation.
    """

    files: Sequence[str]
    numbers: Sequence[int]
    targets: Sequence[int] | None
    dataset: str
    augmentations: Sequence[Augmentation]
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
        """Names of a pipeline's outputs; both hosts use the same."""
        large = [f"large{number}" for number in range(self.large)]
        return [*large, *(f"small{number}" for number in range(self.small)), "label"]

    def wrapper_arguments(self, pipeline: Any) -> dict[str, Any]:
        """Arguments of ``PretrainWrapper``, the same for both hosts."""
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
    """Sets ``reader``, ``decode`` and ``to_int64``, which the graphs of both hosts use.

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
    augmentation from (seed, epoch, rank). A pipeline lives for one epoch, so an epoch after an
    interruption or a resumption is the same as without. Batches that are skipped to reach a place
    within an epoch are decoded nevertheless.

    Args:
        run: a config that :func:`check_dali` has passed.
        images: the training images.

    Attributes:
        sampler: the order of the images; Lightning sets its epoch.
        dataset: the images, by sample index.

    Raises:
        ConfigError: the batch is larger than the data set, or the data set has no image files.
        UserError: while iterating, a file that cannot be read.
    """

    def __init__(self, run: RunConfig, images: Images) -> None:
        self.run = run
        self.batch_size = run.optimizer.batch_size
        self.sampler = epoch_sampler(run, images)
        self.start_at(self.sampler, self.batch_size)
        self.files, self.targets = files_of(images), [int(t) for t in targets_of(images)]
        self.dataset = TrainingViews(images, MultiCrop([], []), run.seed)

    def __repr__(self) -> str:
        return str(_pipelines().transforms(self._pass([])))

    def __iter__(self) -> Iterator[list[Tensor | list[Tensor]]]:
        yield from self.counted(self._batches())

    def _batches(self) -> Iterator[Any]:
        skipped, self.order.start = self.order.start // self.batch_size, 0
        indices = [key.sample for key in self.order][: len(self) * self.batch_size]
        self.order.start = skipped * self.batch_size
        done = 0
        try:
            # The first batch is read before the loop starts, so the loop's own start can fail too.
            for batch in _pipelines().batches(self._pass(indices)):
                done += 1
                if done > skipped:
                    yield batch
        except RuntimeError as error:
            first = done * self.batch_size
            near = indices[first : first + _AHEAD * self.batch_size]
            raise unreadable(error, [self.files[index] for index in near]) from error

    def _pass(self, indices: list[int]) -> DALIPass:
        data, dali = self.run.data, self.run.dali or DALI()
        encoded = dali.encode_indexes_into_labels
        rank = distributed.rank()
        return DALIPass(
            files=[self.files[index] for index in indices],
            numbers=indices if encoded else [self.targets[index] for index in indices],
            targets=self.targets if encoded else None,
            dataset=data.dataset,
            augmentations=self.run.augmentations,
            large=data.num_large_crops or 0,
            small=data.num_small_crops or 0,
            batch_size=self.batch_size,
            num_threads=max(data.num_workers, 1),
            device=dali.device,
            device_id=torch.cuda.current_device() if dali.device == "gpu" else None,
            rank=rank,
            seed=mix(self.run.seed, self.order.epoch, rank) % 2**31,
        )


def check_dali(run: RunConfig) -> None:
    """Refuses settings that the DALI pipelines of the hosts do not support.

    Args:
        run: the checked config.

    Raises:
        ConfigError: DALI is not installed, or the config asks for a data set of torchvision's, for
            equalisation, or to skip unreadable images.
    """
    device_of(run)
    if run.data.dataset not in FILES_ONLY:
        raise ConfigError(
            "data.dataset",
            run.data.dataset,
            "DALI reads image files, not torchvision's archives",
            "unpack it into class folders with data.dataset=custom, or use "
            "data.format=image_folder",
        )
    for place, augmentation in enumerate(run.augmentations):
        if augmentation.equalization.prob:
            raise ConfigError(
                f"augmentations.{place}.equalization.prob",
                augmentation.equalization.prob,
                "DALI has no equalisation",
                "set it to 0, or use data.format=image_folder",
            )


def _pipelines() -> Any:
    """The module that holds the installed host's ``batches`` and ``transforms``."""
    # Import by name, because the package itself imports modules of this folder.
    main = importlib.import_module("solo_ext.host").load().info.generation == "main"
    return importlib.import_module(
        "solo_ext.host.dali_main" if main else "solo_ext.host.release_1_0_2.dali"
    )
