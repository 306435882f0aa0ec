"""Ending a run between two batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback


class _KillAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx >= self.step:
            raise RuntimeError(f"killed at {self.step}")


@pytest.fixture
def kill_at() -> Callable[[int], Callback]:
    """``kill_at(n)``: a callback that raises before the batch that follows n batches."""
    return _KillAt
