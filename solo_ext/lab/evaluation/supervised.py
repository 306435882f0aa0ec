"""Shared by protocols that train with labels: views, schedule, seeds, resumption, accuracies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from timm.scheduler import CosineLRScheduler  # type: ignore[attr-defined]
from torch import Tensor
from torch.optim import Optimizer
from torchvision import transforms as T

from solo_ext.config.schema import Augmentation, Chance, View
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import atomic_write, refuse_link
from solo_ext.data.images import images_fingerprint
from solo_ext.data.loaders import ResumableLoader
from solo_ext.data.transforms import MultiCrop, pretrain_transform
from solo_ext.data.views import EpochSampler, TrainingViews
from solo_ext.lab.evaluation.context import EvalContext
from solo_ext.lab.evaluation.protocol import Protocol

STANDARD_VIEW = View(horizontal_flip=Chance(prob=0.5))
"""Crops of 8 to 100 % of the area, and flips, as usual in supervised training."""
BASE_BATCH = 256
"""Rates are given for this batch size and scaled by batch / 256, as in solo-learn."""
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def training_loader(
    context: EvalContext, view: View, *, batch_size: int, seed: int, random_erasing: float = 0.0
) -> ResumableLoader:
    """Batches ``(indices, [views], targets)``; the last, incomplete one of an epoch is dropped.

    Order and views depend only on (seed, epoch, index), not on the number of workers.

    Args:
        context: images, size and normalisation.
        view: how images are augmented.
        batch_size: images of a batch.
        seed: of order and views.
        random_erasing: probability that a box of the view is blanked (Zhong et al., 2017, arXiv
            1708.04896).

    Raises:
        ConfigError: fewer images than ``batch_size``.
    """
    if batch_size > len(context.train):
        raise ConfigError(
            "batch_size",
            batch_size,
            f"the training set has {len(context.train)} images",
            "take a smaller batch",
        )
    fixed = context.cfg.augmentations[0]
    augmentation = Augmentation(**view.model_dump(), **fixed.model_dump(), num_crops=1)
    transform = pretrain_transform(context.cfg.data.dataset, [augmentation])
    if random_erasing:
        erasing = T.RandomErasing(p=random_erasing)
        transform = MultiCrop([T.Compose([transform.transforms[0], erasing])], [1])
    return ResumableLoader(
        TrainingViews(context.train, transform, seed),
        # One process trains, even if several have extracted the features.
        EpochSampler(len(context.train), seed, num_replicas=1, rank=0),
        batch_size,
        context.cfg.data.num_workers,
    )


def cosine_schedule(optimizer: Optimizer, steps: int, warmup: int = 0) -> Any:
    """timm's schedule by step: linear from 0 over ``warmup`` steps, then half a cosine to 0.

    Call ``step_update(n)`` before step n, counted from 0. A group's ``lr_scale`` is a factor.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> schedule = cosine_schedule(optimizer, steps=10)
    >>> schedule.step_update(5)
    >>> round(optimizer.param_groups[0]["lr"], 6)
    0.5
    """
    return CosineLRScheduler(
        optimizer,
        t_initial=max(steps - warmup, 1),
        warmup_t=warmup,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def autocast(device: str, precision: Precision) -> AbstractContextManager[Any]:
    """Mixed precision inside the block, with Lightning's names."""
    if precision == "32-true":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=_DTYPES[precision])


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """Seeds torch and numpy, which timm's Mixup uses, and restores both afterwards."""
    kind = torch.device(device)
    gpus = [kind.index or 0] if kind.type == "cuda" else []
    # timm draws from numpy's global generator.
    state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


def accuracies(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Percentages of rows whose class is the first guess, and among the first five.

    Rows without a label (-1) do not count; a row with NaN counts as an error of the model.

    Args:
        logits: (n, C).
        targets: (n,), from -1.

    >>> accuracies(torch.eye(8), torch.arange(8))
    {'acc1': 100.0, 'acc5': 100.0}
    """
    labelled = targets >= 0
    logits, targets = logits[labelled], targets[labelled]
    # topk would rank NaN first.
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    guess = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hit = (guess == targets[:, None]) & ~logits.isneginf().all(dim=1, keepdim=True)
    count = max(len(targets), 1)
    return {
        "acc1": 100.0 * int(hit[:, 0].sum()) / count,
        "acc5": 100.0 * int(hit.any(dim=1).sum()) / count,
    }


def save_weights(
    context: EvalContext, name: str, weights: Mapping[str, Tensor], **about: Any
) -> None:
    """Writes weights and class names to the folder of the records."""
    tensors = {k: v.cpu().contiguous() for k, v in weights.items()}
    metadata = {k: json.dumps(v) for k, v in about.items()}
    metadata["classes"] = json.dumps(context.class_names)
    context.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, refuse_link(context.out / name), metadata)


class EvalCheckpoint:
    """A file in the folder of the records, written after every epoch and removed at the end.

    Its name is a digest of everything that the numbers depend on, so another model, setting or data
    set starts anew.

    Args:
        context: model and images.
        settings: of the protocol.
    """

    def __init__(self, context: EvalContext, settings: Protocol) -> None:
        data, first = context.cfg.data, context.cfg.augmentations[0]
        key = {
            "model": context.model.digest,
            "backbone": context.cfg.backbone.model_dump(),
            "protocol": type(settings).__name__,
            "version": settings.version,
            "settings": settings.model_dump(exclude={"save"}),
            "images": [images_fingerprint(i) for i in (context.train, context.test)],
            "paths": [str(data.train_path), str(data.val_path)],
            "view": [first.crop_size, first.mean, first.std],
        }
        text = json.dumps(key, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file: Path = context.out / f".unfinished-{digest}.pt"

    def load(self) -> dict[str, Any] | None:
        """The last state given to :meth:`save`, on the CPU; ``None`` if there is none."""
        if not self.file.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(self.file, map_location="cpu", weights_only=True)
        except Exception:
            # torch raises many types of error for a damaged file; the training then starts anew.
            return None
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Writes the file atomically."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.file, lambda path: torch.save(state, path))

    def remove(self) -> None:
        """Removes the file."""
        self.file.unlink(missing_ok=True)
