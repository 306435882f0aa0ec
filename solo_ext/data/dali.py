"""NVIDIA DALI: fixed views for evaluation and the E-step, and messages for its errors."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from solo_ext.config.schema import DALI, CommonConfig
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.transforms import fixed_view

INSTALL = "pip install 'solo-ext[dali-cuda12]' or 'solo-ext[dali-cuda13]', after your CUDA"
_PREFETCH = 4
"""Most batches that a pipeline reads ahead: the file that failed is in one of them."""


def dali_installed() -> bool:
    """Whether ``nvidia.dali`` can be found."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except (ImportError, ValueError):
        return False


def nvidia_dali() -> Any:
    """The module ``nvidia.dali`` with its PyTorch plugin, imported on first use."""
    found: Any = importlib.import_module("nvidia.dali")
    importlib.import_module("nvidia.dali.plugin.pytorch")
    return found


def device_of(cfg: CommonConfig) -> str:
    """``dali.device`` of a config with ``data.format=dali``.

    Raises:
        ConfigError: DALI is not installed, finds no GPU, or would have to skip unreadable images.

    >>> from solo_ext.config.check import check_run
    >>> from solo_ext.config.compose import compose
    >>> words = ["data.format=dali", "data.unreadable=skip"]
    >>> device_of(check_run(compose("digits/simclr", words)))
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: data.unreadable='skip': DALI stops at an image that it c...
    """
    if cfg.data.unreadable == "skip":
        raise ConfigError(
            "data.unreadable",
            "skip",
            "DALI stops at an image that it cannot read",
            "set it to refuse and remove such images, or use data.format=image_folder",
        )
    if not dali_installed():
        raise ConfigError(
            "data.format",
            "dali",
            "NVIDIA DALI is not installed",
            f"{INSTALL}; or use data.format=image_folder",
        )
    device = (cfg.dali or DALI()).device
    if device == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "dali.device", device, "torch sees no CUDA device here", "set dali.device=cpu"
        )
    return device


class DALIViews:
    """Batches ``(views, labels)`` of files, each once and in order, for ``data.format=dali``.

    Geometry and normalisation are those of :func:`solo_ext.data.transforms.eval_transform`;
    pixels differ from it by rounding, 0.1 to 0.2 grey levels of 255 on average.

    Raises:
        ConfigError: DALI cannot run here.
        UserError: while iterating, a file cannot be read.
    """

    skipped: Sequence[int] = ()
    """Always empty: a file that cannot be read raises an error."""

    def __init__(
        self, cfg: CommonConfig, files: Sequence[str], labels: Sequence[int], batch_size: int
    ) -> None:
        self.files, self.labels = list(files), [int(label) for label in labels]
        self.size, self.statistics = fixed_view(cfg)
        self.batch_size, self.num_threads = batch_size, max(cfg.data.num_workers, 1)
        self.device = device_of(cfg)

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
            unread = self.files[served * self.batch_size :]
            raise unreadable(error, unread, self.batch_size) from error

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
                # Decode as Pillow does: not rotated, with chroma interpolated.
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
    """The geometry of :class:`~solo_ext.data.transforms.FixedView`, with the same rounding."""
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
    """Half of the pixels that are cut off, rounded like Python's ``round``: halves to even."""
    cut = side - size
    half = cut // 2
    return half + (cut - 2 * half) * (half - 2 * (half // 2))


def unreadable(error: RuntimeError, files: Sequence[str], batch_size: int) -> Exception:
    """The error for a failed pipeline; it names the file if one of the next ``files`` is at fault.

    >>> unreadable(RuntimeError("out of memory"), ["a.png"], batch_size=8)
    RuntimeError('out of memory')
    """
    text, files = str(error), files[: _PREFETCH * batch_size]
    named = re.search(r"(?:Failed to decode sample #\d+ :|File mapping failed:) *(.+)", text)
    found = named.group(1).strip() if named else None
    if found not in files:
        if not re.search(r"readers\.file|decoders\.[iI]mage", text):
            return error
        # Some decoders do not name the file: decode each one by itself to find it.
        found = next((file for file in files if not _decodes(file)), None)
        if found is None:
            return error
    return UserError(
        f"DALI cannot read the image {found!r}: truncated, empty or no image; remove it or replace "
        "it; data.format=image_folder reads with Pillow instead"
    )


def _decodes(file: str) -> bool:
    dali = nvidia_dali()

    def single() -> Any:
        return dali.fn.decoders.image(dali.fn.readers.file(files=[file])[0], device="cpu")

    try:
        dali.pipeline_def(single)(batch_size=1, num_threads=1, device_id=None).run()
    except RuntimeError:
        return False
    return True
