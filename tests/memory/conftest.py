"""What the tests of several kinds of state share."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn


def through_a_file(module: nn.Module) -> dict[str, Tensor]:
    """A checkpoint of it, written and read."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state: dict[str, Tensor] = torch.load(file, weights_only=True)
    return state
