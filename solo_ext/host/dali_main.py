"""DALI pretraining pipelines for solo-learn's main branch. Import it only if DALI is installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from solo_ext.config import schema
from solo_ext.core.draws import derive_seed
from solo_ext.data.images import files_of, open_images
from solo_ext.data.reading import targets_of
from solo_ext.data.transforms import STATISTICS
from solo_ext.host.dali_loader import DALILoader, open_reader

upstream: Any = importlib.import_module("solo.data.dali_dataloader")
_crops: Any = importlib.import_module("solo.data.pretrain_dataloader")


class PretrainPipelineBuilder(upstream.PretrainPipelineBuilder):  # type: ignore[misc]
    """Upstream's graph with our reader: it also runs on CPUs, and uses the run's seed.

    Arguments are upstream's; ``seed`` is used only if ``seed_everything`` was not called.
    """

    def __init__(
        self,
        data_path: str | Path,
        batch_size: int,
        device: str,
        transforms: Any,
        random_shuffle: bool = True,
        device_id: int = 0,
        shard_id: int = 0,
        num_shards: int = 1,
        num_threads: int = 4,
        seed: int = 12,
        no_labels: bool = False,
        encode_indexes_into_labels: bool = False,
        data_fraction: float = -1.0,
    ) -> None:
        images = open_images(
            schema.Images(
                train_path=str(data_path),
                dataset="custom",
                format="dali",
                no_labels=no_labels,
                fraction=data_fraction if 0 < data_fraction < 1 else -1,
            ),
            "train",
        )
        files, targets = files_of(images), [int(t) for t in targets_of(images)]
        seed = int(os.environ.get("PL_GLOBAL_SEED", seed))
        order = list(range(len(files)))
        if random_shuffle:
            # DALI's own shuffle is the same for every seed.
            generator = torch.Generator().manual_seed(derive_seed(seed))
            order = torch.randperm(len(files), generator=generator).tolist()
        if encode_indexes_into_labels:
            self.conversion_map = targets
        self.batch_size, self.num_threads = batch_size, max(num_threads, 1)
        # Given a device number, DALI opens that GPU even if all operators run on the CPU.
        self.device, self.device_id = device, None if device == "cpu" else device_id
        self.transforms, self.seed = transforms, derive_seed(seed, shard_id) % 2**31
        open_reader(
            self,
            [files[i] for i in order],
            order if encode_indexes_into_labels else [targets[i] for i in order],
            device,
            shard_id=shard_id,
            num_shards=num_shards,
            shuffle_after_epoch=random_shuffle,
        )


class PretrainWrapper(upstream.PretrainWrapper):  # type: ignore[misc]
    """Gives every epoch its full length, also after an interrupted epoch."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            try:
                batch = next(self)
            except StopIteration:
                batch = next(self)
            yield batch


def transforms(run: schema.RunConfig) -> Any:
    """Upstream's augmentation of all crops."""
    # For names that it knows, upstream ignores the mean and deviation of a config.
    dataset = run.data.dataset if run.data.dataset in STATISTICS else "custom"
    return _crops.FullTransformPipeline(
        [
            _crops.NCropAugmentation(
                upstream.build_transform_pipeline_dali(
                    dataset,
                    # A null would override upstream's default value.
                    OmegaConf.create(a.model_dump(exclude_none=True)),
                    dali_device=(run.dali or schema.DALI()).device,
                ),
                a.num_crops,
            )
            for a in run.augmentations
        ]
    )


def batches(loader: DALILoader, indices: Sequence[int]) -> Iterator[Any]:
    """Yields ``[indices, [crops], targets]`` of one pass over some samples."""
    graph = SimpleNamespace(device=loader.device, transforms=transforms(loader.run))
    open_reader(graph, *loader.read(indices), loader.device)
    pipeline = PretrainPipelineBuilder.pipeline(graph, **loader.pipeline_arguments)
    return iter(PretrainWrapper(dataset_size=len(indices), **loader.wrapper_arguments(pipeline)))
