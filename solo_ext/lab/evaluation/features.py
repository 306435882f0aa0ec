"""Features of a frozen backbone for a whole data set."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.memory.state import eval_mode

BatchProgress = Callable[[int, int], None]


def extract_features(
    backbone: nn.Module,
    loader: Iterable[Any],
    *,
    device: str | torch.device = "cpu",
    channels_last: bool = False,
    progress: BatchProgress | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Runs a backbone in eval mode over a loader and collects its outputs and the targets.

    Outputs (B, D) are kept as they are, feature maps (B, D, H, W) are averaged over H and W. The
    training mode of every submodule is restored afterwards, also after an error. The backbone is
    moved to ``device`` and stays there. Where the loader knows how many images it has, memory for
    all rows is taken once and filled.

    Args:
        backbone: maps images (B, C, H, W) to (B, D) or (B, D, H, W).
        loader: yields ``(images, targets)`` or ``(indices, images, targets)``; targets (B,) whole
            numbers.
        device: where the backbone runs.
        channels_last: passes the images in the channels-last memory format.
        progress: called after every batch with the number of batches done and in all, the latter
            0 if the loader has no length.
        dtype: of the features that are returned.

    Returns:
        Features (n, D), finite, and targets (n,), int64, both on the CPU.

    Raises:
        ValueError: the loader is empty, a batch or an output has another form, or features are
            not finite.
    """
    rows = RowBuffer(_rows(loader), dtype)
    stream = feature_batches(
        backbone, loader, device=device, channels_last=channels_last, progress=progress
    )
    with closing(stream):
        for features, labels in stream:
            rows.add(features, labels)
    return rows.filled()


# Not inference_mode: a tensor that a module caches under it could never be trained through again.
@torch.no_grad()
def feature_batches(
    backbone: nn.Module,
    loader: Iterable[Any],
    *,
    device: str | torch.device = "cpu",
    channels_last: bool = False,
    progress: BatchProgress | None = None,
) -> Generator[tuple[Tensor, Tensor]]:
    """The batches of :func:`extract_features`, one by one: features (B, D), fp32, and targets.

    A generator: close it, or run it to its end, for the modes of the backbone to be restored.
    """
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    total = _length(loader)
    backbone.to(device)
    with eval_mode(backbone):
        for done, batch in enumerate(loader, start=1):
            images, labels = _images_and_targets(batch)
            output = backbone(images.to(device, memory_format=memory_format))
            yield pooled(output, len(labels)).cpu(), labels.cpu()
            if progress is not None:
                progress(done, total)


class RowBuffer:
    """Rows of features and targets, in memory that is taken once.

    Args:
        capacity: rows that are expected; the buffer grows where more come.
        dtype: of the features.
    """

    def __init__(self, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        self.capacity, self.dtype = capacity, dtype
        self.count = self.broken = 0
        self._features: Tensor | None = None
        self._targets: Tensor | None = None

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Appends rows.

        Args:
            features: (B, D).
            targets: (B,).
        """
        end = self.count + len(features)
        if self._features is None or end > len(self._features):
            self._grow(end, features.shape[1])
        assert self._features is not None
        assert self._targets is not None
        rows = self._features[self.count : end]
        rows.copy_(features)
        self._targets[self.count : end] = targets
        # After the cast: half precision may overflow.
        self.broken += int((~rows.isfinite().all(dim=1)).sum())
        self.count = end

    def filled(self) -> tuple[Tensor, Tensor]:
        """All rows, (n, D) and (n,).

        Raises:
            ValueError: there are none, or some are not finite.
        """
        if self._features is None or self._targets is None or not self.count:
            raise ValueError("The loader yielded no images; pass one with at least one batch.")
        if self.broken:
            raise ValueError(
                f"{self.broken} of {self.count} rows of features are not finite; check the weights "
                "of the backbone and its input normalisation."
            )
        return self._features[: self.count], self._targets[: self.count]

    def _grow(self, needed: int, width: int) -> None:
        held = self._features
        size = max(self.capacity, needed if held is None else max(needed, 2 * len(held)))
        features = torch.empty(size, width, dtype=self.dtype)
        targets = torch.empty(size, dtype=torch.int64)
        if held is not None and self._targets is not None:
            features[: self.count], targets[: self.count] = (
                held[: self.count],
                self._targets[: self.count],
            )
        self._features, self._targets = features, targets


def _rows(loader: Iterable[Any]) -> int:
    try:
        return len(loader.sampler)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return 0


def _length(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # an iterable data set has a __len__ that raises
        return 0


def _images_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        found = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise ValueError(
            f"A batch is {found}; the loader must yield (images, targets) or (indices, images, "
            "targets)."
        )
    images, labels = batch[-2], torch.as_tensor(batch[-1])
    if not isinstance(images, Tensor) or labels.shape != images.shape[:1]:
        found = str(tuple(images.shape)) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"A batch has images {found} and targets {tuple(labels.shape)}; the loader must yield "
            "one tensor of images and one whole-number target per image."
        )
    return images, labels.long()


def pooled(output: Any, rows: int) -> Tensor:
    """Features (B, D), fp32, of what a backbone returned: feature maps are averaged.

    Raises:
        ValueError: the output is neither (B, D) nor (B, D, H, W), or of another B than ``rows``.
    """
    if not isinstance(output, Tensor) or output.ndim not in (2, 4) or len(output) != rows:
        found = str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"The backbone returned {found} for {rows} images; it must return a tensor (B, D) or "
            "(B, D, H, W)."
        )
    features = output.float()
    return features if features.ndim == 2 else features.mean(dim=(2, 3))
