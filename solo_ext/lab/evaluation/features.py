"""Features of a frozen backbone: their extraction, and the form that protocols get them in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solo_ext.core.errors import UserError
from solo_ext.memory.state import eval_mode

BatchProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Features:
    """Frozen features of both splits; rows with target -1 carry no label.

    Attributes:
        train: (n, D), on the CPU, finite; float32, or half precision if they are stored so.
        train_targets: (n,) int64.
        test: (m, D).
        test_targets: (m,).
        num_classes: C; ``None`` means one more than the largest target.
        device: where to compute.
        class_names: by number; empty if unknown.

    >>> x = torch.eye(3)
    >>> features = Features(x, torch.tensor([0, 1, -1]), x, torch.tensor([0, 1, 2]))
    >>> features.classes, features.split("train")[0].shape
    (3, torch.Size([2, 3]))
    """

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_targets: Tensor
    num_classes: int | None = None
    device: str = "cpu"
    class_names: Sequence[str] = ()

    def name_of(self, label: int) -> str:
        """Name of a class in messages."""
        return repr(self.class_names[label]) if label < len(self.class_names) else str(label)

    @property
    def classes(self) -> int:
        """C, from the data set or else from the targets."""
        targets = (self.train_targets, self.test_targets)
        return self.num_classes or 1 + max(int(t.max()) for t in targets)

    def split(self, name: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        """Labelled features of one split and their targets.

        Raises:
            UserError: the split has none.
        """
        features = self.train if name == "train" else self.test
        targets = self.train_targets if name == "train" else self.test_targets
        labelled = targets >= 0
        if not labelled.any():
            path = "train_path" if name == "train" else "val_path"
            raise UserError(
                f"none of {len(targets)} images of the {name} split has a label; give images with "
                f"labels, such as class folders, with data.{path}=..."
            )
        return (features, targets) if labelled.all() else (features[labelled], targets[labelled])


def extract_features(
    backbone: nn.Module,
    loader: Iterable[Any],
    *,
    device: str | torch.device = "cpu",
    progress: BatchProgress | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Runs a backbone in eval mode over a loader and collects its outputs and the targets.

    Outputs (B, D) are kept as they are, feature maps (B, D, H, W) are averaged over H and W. The
    training mode of every submodule is restored afterwards, also after an error. The backbone is
    moved to ``device`` and stays there. If the loader has a sampler of known length, memory for all
    rows is allocated once.

    Args:
        backbone: maps images (B, C, H, W) to (B, D) or (B, D, H, W).
        loader: yields ``(images, targets)`` or ``(indices, images, targets)``; targets (B,) whole
            numbers.
        device: where the backbone runs.
        progress: called after every batch with the number of batches done and in all, which is 0
            if the loader has no length.
        dtype: of the features that are returned.

    Returns:
        Features (n, D), finite, and targets (n,), int64, both on the CPU.

    Raises:
        ValueError: the loader is empty, a batch or an output has another form, or features are
            not finite.

    >>> batches = [(torch.ones(4, 3, 8, 8), torch.arange(4)), (torch.ones(2, 3, 8, 8), [4, 5])]
    >>> features, targets = extract_features(nn.Identity(), batches)
    >>> features.shape, targets.tolist()
    (torch.Size([6, 3]), [0, 1, 2, 3, 4, 5])
    """
    rows, labels = torch.empty(0, 0, dtype=dtype), torch.empty(0, dtype=torch.int64)
    count = broken = 0
    with closing(feature_batches(backbone, loader, device=device, progress=progress)) as stream:
        for features, targets in stream:
            end = count + len(features)
            if not count or end > len(rows):
                size = max(_expected(loader), end, 2 * count)
                # resize_ keeps the rows that are already there.
                rows.resize_(size, features.shape[1])
                labels.resize_(size)
            rows[count:end], labels[count:end] = features, targets
            # Check after the cast to dtype, because half precision may overflow.
            broken += int((~rows[count:end].isfinite().all(dim=1)).sum())
            count = end
    if not count:
        raise ValueError("The loader yielded no images; pass one with at least one batch.")
    if broken:
        raise ValueError(
            f"{broken} of {count} rows of features are not finite; check the weights of the "
            "backbone and its input normalisation."
        )
    return rows[:count], labels[:count]


# no_grad: a tensor that a module caches under inference_mode could not be used in training later.
@torch.no_grad()
def feature_batches(
    backbone: nn.Module,
    loader: Iterable[Any],
    *,
    device: str | torch.device = "cpu",
    progress: BatchProgress | None = None,
) -> Generator[tuple[Tensor, Tensor]]:
    """The batches of :func:`extract_features` one by one: features (B, D), fp32, and targets.

    Close the generator or run it to its end, so that the modes of the backbone are restored.
    """
    total = _batches(loader)
    backbone.to(device)
    with eval_mode(backbone):
        for done, batch in enumerate(loader, start=1):
            images, labels = _images_and_targets(batch)
            yield pooled(backbone(images.to(device)), len(labels)).cpu(), labels.cpu()
            if progress is not None:
                progress(done, total)


def pooled(output: Any, rows: int) -> Tensor:
    """Features (B, D), fp32, from a backbone's output; feature maps are averaged.

    Raises:
        ValueError: the output is neither (B, D) nor (B, D, H, W), or of another B than ``rows``.

    >>> pooled(torch.ones(4, 16, 7, 7, dtype=torch.bfloat16), 4).shape
    torch.Size([4, 16])
    """
    if not isinstance(output, Tensor) or output.ndim not in (2, 4) or len(output) != rows:
        found = str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"The backbone returned {found} for {rows} images; it must return a tensor (B, D) or "
            "(B, D, H, W)."
        )
    features = output.float()
    return features if features.ndim == 2 else features.mean(dim=(2, 3))


def _expected(loader: Any) -> int:
    """Number of images of a loader, 0 if unknown."""
    try:
        return len(loader.sampler)
    except (AttributeError, TypeError):
        return 0


def _batches(loader: Any) -> int:
    try:
        return len(loader)
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
