"""Learning rate per step, precision, and chance per epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from timm.scheduler import CosineLRScheduler  # type: ignore[attr-defined]
from torch.optim import Optimizer

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
BASE_BATCH = 256
"""Rates are given for this batch and scaled by batch / 256, as solo-learn's are."""


def cosine_schedule(optimizer: Optimizer, steps: int, warmup: int = 0) -> Any:
    """timm's schedule by step: linear from 0 over ``warmup`` steps, then half a cosine to 0.

    Call ``step_update(n)`` before step n, counted from 0. A group's ``lr_scale`` multiplies.
    """
    return CosineLRScheduler(
        optimizer,
        t_initial=max(steps - warmup, 1),
        warmup_t=warmup,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def autocast(device: str, precision: Precision) -> AbstractContextManager[Any]:
    """Mixed precision inside the block, under Lightning's names."""
    if precision == "32-true":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=_DTYPES[precision])


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """Seeds torch and numpy, which timm's Mixup draws from, and puts both back afterwards."""
    kind = torch.device(device)
    gpus = [kind.index or 0] if kind.type == "cuda" else []
    # numpy's global generator is what timm draws from.
    state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002
