"""DALI pretraining pipelines for solo-learn 1.0.2. Import it only if DALI is installed.

The release's methods get pipelines from mixins that read argparse's values. Here the release's
pipeline, augmentation and iterator are built from main's config, and these classes do not change.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from solo_ext.config.schema import DALI, Augmentation, RunConfig
from solo_ext.data.transforms import statistics
from solo_ext.host.dali_loader import DALILoader, open_reader

upstream: Any = importlib.import_module("solo.utils.dali_dataloader")
_wrappers: Any = importlib.import_module("solo.methods.dali")
_crops: Any = importlib.import_module("solo.utils.pretrain_dataloader")
_ops: Any = importlib.import_module("nvidia.dali.ops")
_types: Any = importlib.import_module("nvidia.dali.types")
_Pipeline: Any = importlib.import_module("nvidia.dali.pipeline").Pipeline


class PretrainPipeline(upstream.PretrainPipeline):  # type: ignore[misc]
    """The release's graph with our reader: it also runs on CPUs."""

    def __init__(self, loader: DALILoader, indices: Sequence[int]) -> None:
        # Skip the release's own constructor, which would open folders and ask for a GPU.
        _Pipeline.__init__(self, **loader.pipeline_arguments)
        self.device = loader.device
        self.transforms = transforms(loader.run)
        open_reader(self, *loader.read(indices), loader.device)


def transforms(run: RunConfig) -> Any:
    """The release's augmentation of all crops."""
    return _crops.FullTransformPipeline(
        [_crops.NCropAugmentation(_transform(run, a), a.num_crops) for a in run.augmentations]
    )


def _transform(run: RunConfig, a: Augmentation) -> Any:
    device = (run.dali or DALI()).device
    mean, std = statistics(run.data.dataset, a)
    jitter = a.color_jitter
    made = upstream.CustomTransform(
        device=device,
        brightness=jitter.brightness,
        contrast=jitter.contrast,
        saturation=jitter.saturation,
        hue=jitter.hue,
        color_jitter_prob=jitter.prob,
        gray_scale_prob=a.grayscale.prob,
        horizontal_flip_prob=a.horizontal_flip.prob,
        gaussian_prob=a.gaussian_blur.prob,
        solarization_prob=a.solarization.prob,
        min_scale=a.rrc.crop_min_scale,
        max_scale=a.rrc.crop_max_scale,
        crop_size=a.crop_size,
        mean=mean,
        std=std,
    )
    if not a.rrc.enabled:
        # Resize instead of cropping, as main does; the release has no such setting.
        size = a.crop_size, a.crop_size
        made.random_crop = _ops.Resize(device=device, size=size, interp_type=_types.INTERP_CUBIC)
    for setting, step in (
        ("color_jitter", "random_color_jitter"),
        ("grayscale", "random_grayscale"),
        ("gaussian_blur", "random_gaussian_blur"),
        ("solarization", "random_solarization"),
    ):
        if not getattr(a, setting).prob:
            # The release computes this step for every image even if its probability is 0: skip it.
            setattr(made, step, _unchanged)
    return made


def _unchanged(images: Any) -> Any:
    return images


def batches(loader: DALILoader, indices: Sequence[int]) -> Iterator[Any]:
    """Yields ``[indices, [crops], targets]`` of one pass over some samples."""
    pipeline = PretrainPipeline(loader, indices)
    return iter(_wrappers.PretrainWrapper(**loader.wrapper_arguments(pipeline)))
