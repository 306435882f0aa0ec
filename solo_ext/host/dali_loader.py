"""The training loader of ``data.format=dali``: the host's pipelines, in our order."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from solo_ext.core import distributed
from solo_ext.core.draws import mix
from solo_ext.core.errors import ConfigError
from solo_ext.data.dali import cannot_skip, device_of, unreadable
from solo_ext.data.images import files_of, targets_of
from solo_ext.data.loaders import epoch_sampler
from solo_ext.data.reading import Images
from solo_ext.data.sampler import StatefulLoader
from solo_ext.data.transforms import MultiCrop
from solo_ext.data.views import TrainingViews
from solo_ext.host.dali_pass import DALIPass

FILES_ONLY = ("custom", "imagenet", "imagenet100")
_AHEAD = 4
"""Batches that a pipeline may have read when it fails on one."""


class DALILoader(StatefulLoader):
    """Batches ``[indices, [crops], targets]`` through the host's own DALI pipeline.

    Which images a batch holds is what the ordinary loader's seed, epoch and rank say; the
    augmentation is drawn by DALI from (seed, epoch, rank). A pipeline lives for one epoch, so
    that an epoch cut short, or resumed, is what it would have been. Batches passed over on the
    way to a place within an epoch are decoded.

    Args:
        cfg: a config that :func:`check_dali` has passed.
        images: the training images.

    Attributes:
        sampler: the order; Lightning tells it the epoch.
        dataset: the images, by sample index.

    Raises:
        ConfigError: the batch is larger than the data set, or this is no set of files.
        UserError: while iterating, a file that cannot be read.
    """

    def __init__(self, cfg: Mapping[str, Any], images: Images) -> None:
        self.cfg = cfg
        self.batch_size: int = cfg["optimizer"]["batch_size"]
        self.sampler = epoch_sampler(cfg, images)
        self.start_at(self.sampler, self.batch_size)
        self.files, self.targets = files_of(images), [int(t) for t in targets_of(images)]
        self.dataset = TrainingViews(images, MultiCrop([], []), cfg["seed"])

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
            # The first batch is read here.
            for batch in _pipelines().batches(self._pass(indices)):
                done += 1
                if done > skipped:
                    yield batch
        except RuntimeError as error:
            first = done * self.batch_size
            near = indices[first : first + _AHEAD * self.batch_size]
            raise unreadable(error, [self.files[index] for index in near]) from error

    def _pass(self, indices: list[int]) -> DALIPass:
        data, dali = self.cfg["data"], self.cfg["dali"]
        encoded = dali["encode_indexes_into_labels"]
        rank = distributed.rank()
        on_gpu = dali["device"] == "gpu"
        return DALIPass(
            files=[self.files[index] for index in indices],
            numbers=indices if encoded else [self.targets[index] for index in indices],
            targets=self.targets if encoded else None,
            dataset=data["dataset"],
            augmentations=self.cfg["augmentations"],
            large=data["num_large_crops"],
            small=data["num_small_crops"],
            batch_size=self.batch_size,
            num_threads=max(data["num_workers"], 1),
            device=dali["device"],
            device_id=torch.cuda.current_device() if on_gpu else None,
            rank=rank,
            seed=mix(self.cfg["seed"], self.order.epoch, rank) % 2**31,
        )


def check_dali(given: Mapping[str, Any]) -> None:
    """Refuses what the hosts' DALI pipelines cannot do.

    Args:
        given: the checked config.

    Raises:
        ConfigError: DALI is not there, a data set of torchvision's, equalisation, or unreadable
            images to skip.
    """
    if given["data"]["unreadable"] == "skip":
        raise cannot_skip()
    device_of(given)
    if given["data"]["dataset"] not in FILES_ONLY:
        raise ConfigError(
            "data.dataset",
            given["data"]["dataset"],
            "DALI reads image files, not torchvision's archives",
            "unpack it into class folders with data.dataset=custom, or use "
            "data.format=image_folder",
        )
    for place, augmentation in enumerate(given["augmentations"]):
        if augmentation["equalization"]["prob"]:
            raise ConfigError(
                f"augmentations.{place}.equalization.prob",
                augmentation["equalization"]["prob"],
                "DALI has no equalisation",
                "set it to 0, or use data.format=image_folder",
            )


def _pipelines() -> Any:
    """The module that holds the installed host's ``batches`` and ``transforms``."""
    # By name: a module of the package that imports the package goes round in a circle.
    main = importlib.import_module("solo_ext.host").load().info.generation == "main"
    return importlib.import_module(
        "solo_ext.host.dali_main" if main else "solo_ext.host.release_1_0_2.dali"
    )
