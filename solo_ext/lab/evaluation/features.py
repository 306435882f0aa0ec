"""Frozen features: the rows of both splits, and how a backbone gives them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.data.fixed import eval_mode

BatchProgress = Callable[[int, int], None]
Rows = tuple[Tensor, Tensor]
"""Features (n, D) and their classes (n,), int64."""


@dataclass(frozen=True)
class Features:
    """Frozen features (n, D) and classes (n,) of both splits, finite, and names of C classes."""

    train: Rows
    test: Rows
    class_names: Sequence[str]

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.class_names)

    def to(self, device: str) -> Features:
        """The same on a device."""
        train, test = ((x.to(device), y.to(device)) for x, y in (self.train, self.test))
        return Features(train, test, self.class_names)


def extract_features(
    backbone: nn.Module,
    loader: Any,
    *,
    device: str | torch.device = "cpu",
    progress: BatchProgress | None = None,
) -> Rows:
    """Runs a backbone in eval mode over a loader and collects its outputs and the targets.

    The mode of every submodule is restored afterwards, also after an error.

    Args:
        backbone: images (B, C, H, W) to (B, D), or to (B, D, H, W), of which the mean is taken.
        loader: sized; yields ``(images, targets)``.
        device: where the backbone runs, and stays.
        progress: called with the number of batches done and in all.

    Raises:
        ValueError: an output has another form, or features are not finite.

    >>> batches = [(torch.ones(4, 3, 8, 8), torch.arange(4)), (torch.ones(2, 3, 8, 8), [4, 5])]
    >>> features, targets = extract_features(nn.Identity(), batches)
    >>> features.shape, targets.tolist()
    (torch.Size([6, 3]), [0, 1, 2, 3, 4, 5])
    """
    stream = feature_batches(backbone, loader, device=device, progress=progress)
    features, targets = (torch.cat(column) for column in zip(*stream, strict=True))
    refuse_non_finite(features)
    return features, targets


# no_grad: a tensor that a module caches under inference_mode could not be used in training later.
@torch.no_grad()
def feature_batches(
    backbone: nn.Module,
    loader: Any,
    *,
    device: str | torch.device = "cpu",
    progress: BatchProgress | None = None,
) -> Generator[Rows]:
    """The batches of :func:`extract_features` one by one, in fp32.

    Close the generator or run it to its end, so that the modes of the backbone are restored.
    """
    backbone.to(device)
    with eval_mode(backbone):
        for done, (images, labels) in enumerate(loader, start=1):
            targets = torch.as_tensor(labels).long().cpu()
            features = pooled(backbone(images.to(device)), len(targets)).cpu()
            if progress is not None:
                progress(done, len(loader))
            yield features, targets


def pooled(output: Tensor, rows: int) -> Tensor:
    """Features (B, D), fp32, from a backbone's output; feature maps are averaged.

    Raises:
        ValueError: the output is neither (B, D) nor (B, D, H, W), or of another B than ``rows``.

    >>> pooled(torch.ones(4, 16, 7, 7, dtype=torch.bfloat16), 4).shape
    torch.Size([4, 16])
    """
    if output.ndim not in (2, 4) or len(output) != rows:
        raise ValueError(
            f"The backbone returned {tuple(output.shape)} for {rows} images; it must return "
            "(B, D) or (B, D, H, W)."
        )
    features = output.float()
    return features if features.ndim == 2 else features.mean(dim=(2, 3))


def refuse_non_finite(features: Tensor) -> None:
    """Refuses features (n, D) with infinities or NaN by a ``ValueError``."""
    broken = int((~features.isfinite().all(dim=1)).sum())
    if broken:
        raise ValueError(
            f"{broken} of {len(features)} rows of features are not finite; check the weights of "
            "the backbone and its input normalisation."
        )
