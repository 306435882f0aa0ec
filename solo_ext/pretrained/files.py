"""Checkpoint files: what they hold, without running what they say."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from solo_ext.errors import UserError

_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")


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
        refused = _REFUSED.search(str(error))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if refused is not None:
            reason = f"it holds {refused[1]}, which is code and not run"
        raise UserError(f"checkpoint {str(path)!r} cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise UserError(
            f"checkpoint {str(path)!r} holds a {type(state).__name__}: it is no checkpoint"
        )
    return state


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file onto the CPU.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return load_file(path)
    except Exception as error:
        raise UserError(f"checkpoint {str(path)!r} cannot be read: {error}") from error


def file_digest(path: Path) -> str:
    """First 16 hex digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def state_digest(state: Mapping[str, Tensor]) -> str:
    """First 16 hex digits of the SHA-256 of a state dict: its keys, types, shapes and values."""
    digest = hashlib.sha256()
    for key, value in sorted(state.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def check_fit(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    target: str,
    remedy: str,
    prefix: str = "",
) -> None:
    """Refuses weights that are not exactly those of a network.

    Args:
        network: that is to take them.
        weights: by key.
        source: where they come from, with its name.
        target: what the network is, with its name.
        remedy: what to do.
        prefix: of the keys in their file.

    Raises:
        UserError: naming the first keys that are missing, unexpected or of another shape.
    """
    own = network.state_dict()
    faults = {
        "missing": [k for k in own if k not in weights],
        "unexpected": [k for k in weights if k not in own],
        "of another shape": [k for k in own if k in weights and own[k].shape != weights[k].shape],
    }
    found = "; ".join(
        f"{fault}: {', '.join(prefix + k for k in keys[:3])}"
        for fault, keys in faults.items()
        if keys
    )
    if found:
        raise UserError(f"{source} does not fit {target} ({found}); {remedy}")
