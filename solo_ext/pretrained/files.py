"""Checkpoint files: what they hold, without running what they say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.errors import UserError


def read_checkpoint(path: Path, allowed: tuple[type, ...] = ()) -> dict[str, Any]:
    """Reads a file of ``torch.save`` onto the CPU; no code in it is run.

    Args:
        path: the file.
        allowed: classes besides tensors and plain containers that the file may hold.

    Raises:
        UserError: it cannot be read, or holds no mapping.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"checkpoint {str(path)!r} cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise UserError(
            f"checkpoint {str(path)!r} holds a {type(state).__name__}: it is no checkpoint"
        )
    return state


def file_digest(path: Path) -> str:
    """First 16 hex digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def check_fit(
    network: nn.Module, weights: Mapping[str, Tensor], source: str, target: str, remedy: str
) -> None:
    """Refuses weights that are not exactly those of a network.

    Args:
        network: that is to take them.
        weights: by key.
        source: where they come from, with its name.
        target: what the network is, with its name.
        remedy: what to do.

    Raises:
        UserError: naming the first keys that are missing, unexpected or of another shape.
    """
    own = network.state_dict()
    faults = {
        "missing": [k for k in own if k not in weights],
        "unexpected": [k for k in weights if k not in own],
        "of another shape": [k for k in own if k in weights and own[k].shape != weights[k].shape],
    }
    found = "; ".join(f"{fault}: {', '.join(keys[:3])}" for fault, keys in faults.items() if keys)
    if found:
        raise UserError(f"{source} does not fit {target} ({found}); {remedy}")
