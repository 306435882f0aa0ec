"""Features of a frozen backbone for a whole data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.modules.modes import eval_mode


# Not inference_mode: a tensor that a module caches under it could never be trained through again.
@torch.no_grad()
def extract_features(
    backbone: nn.Module,
    loader: Iterable[Any],
    *,
    device: str | torch.device = "cpu",
    channels_last: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs a backbone in eval mode over a loader and collects its outputs and the targets.

    Outputs (B, D) are kept as they are, feature maps (B, D, H, W) are averaged over H and W. The
    training mode of every submodule is restored afterwards, also after an error. The backbone is
    moved to ``device`` and stays there.

    Args:
        backbone: maps images (B, C, H, W) to (B, D) or (B, D, H, W).
        loader: yields ``(images, targets)`` or ``(indices, images, targets)``; targets (B,) whole
            numbers.
        device: where the backbone runs.
        channels_last: passes the images in the channels-last memory format.
        progress: called after every batch with the number of batches done and in all, the latter
            0 if the loader has no length.

    Returns:
        Features (n, D), float32, finite, and targets (n,), int64, both on the CPU.

    Raises:
        ValueError: the loader is empty, a batch or an output has another form, or features are
            not finite.
    """
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    total = _length(loader)
    features: list[Tensor] = []
    targets: list[Tensor] = []
    backbone.to(device)
    with eval_mode(backbone):
        for batch in loader:
            images, labels = _images_and_targets(batch)
            output = backbone(images.to(device, memory_format=memory_format))
            features.append(_flatten(output, len(labels)).cpu())
            targets.append(labels.cpu())
            if progress is not None:
                progress(len(features), total)
    if not sum(len(labels) for labels in targets):
        raise ValueError("The loader yielded no images; pass one with at least one batch.")
    joined = torch.cat(features)
    broken = int((~joined.isfinite().all(dim=1)).sum())
    if broken:
        raise ValueError(
            f"{broken} of {len(joined)} rows of features are not finite; check the weights of the "
            "backbone and its input normalisation."
        )
    return joined, torch.cat(targets)


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


def _flatten(output: Any, rows: int) -> Tensor:
    if not isinstance(output, Tensor) or output.ndim not in (2, 4) or len(output) != rows:
        found = str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"The backbone returned {found} for {rows} images; it must return a tensor (B, D) or "
            "(B, D, H, W)."
        )
    features = output.float()
    return features if features.ndim == 2 else features.mean(dim=(2, 3))
