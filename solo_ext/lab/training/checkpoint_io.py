"""Checkpoints written where they are to stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to its path at once.

    Lightning's own holds the file in memory and moves it over from the system's folder for
    temporary files: twice the memory, a small disk that runs full, and a leftover there of every
    process killed meanwhile. Whoever calls this makes the file appear whole.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Writes the file.

        Raises:
            OSError: it cannot be written.
            RuntimeError: the same, in torch's words.
        """
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # A link of that name would be written through.
        Path(path).unlink(missing_ok=True)
        torch.save(checkpoint, path)
