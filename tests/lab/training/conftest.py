"""Ending a run between two batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lightning.pytorch.callbacks import Callback

from tests.lab.training.resumable import KillAt


@pytest.fixture
def kill_at() -> Callable[[int], Callback]:
    """``kill_at(n)``: a callback that raises before the batch that follows n batches."""
    return KillAt
