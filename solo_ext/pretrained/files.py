"""Checkpoint files: reads their content without running code in it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from solo_ext.core.errors import UserError, first_line
from solo_ext.core.files import check_archive, open_regular

_WRAPPED = ("module.", "_orig_mod.")
_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")


def read_checkpoint(path: Path, allowed: tuple[type, ...] = ()) -> dict[str, Any]:
    """Reads a file of ``torch.save`` onto the CPU; no code in it is run.

    Besides tensors and plain containers it may hold objects of the ``allowed`` classes.

    Raises:
        UserError: the file cannot be read, or holds no mapping.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "file.pth"
    >>> torch.save({"weight": torch.ones(2)}, file)
    >>> read_checkpoint(file)
    {'weight': tensor([1., 1.])}
    """
    check_archive(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _REFUSED.search(str(error))
        # Of other errors torch tells what its reader met, or how to load it with the code in it.
        reason = "it is no file of torch.save, or a damaged one"
        if refused is not None:
            reason = f"it holds {refused[1]}, which is code and not run; save model.state_dict()"
        elif isinstance(error, OSError | MemoryError):
            reason = first_line(error)
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

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> file = Path(tempfile.mkdtemp()) / "file.safetensors"
    >>> save_file({"weight": torch.ones(2)}, file)
    >>> read_safetensors(file)
    {'weight': tensor([1., 1.])}
    """
    try:
        open_regular(path).close()
        return load_file(path)
    except Exception as error:
        raise UserError(f"checkpoint {str(path)!r} cannot be read: {error}") from error


def file_digest(path: Path) -> str:
    """First 16 hex digits of a file's SHA-256.

    >>> file_digest(Path(__file__)) == file_digest(Path(__file__))
    True
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def state_digest(state: Mapping[str, Tensor]) -> str:
    """First 16 hex digits of the SHA-256 of keys, types, shapes and values of a state dict.

    >>> state_digest({"weight": torch.zeros(2)}) == state_digest({"weight": torch.ones(2)})
    False
    """
    digest = hashlib.sha256()
    for key, value in sorted(state.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def holds_values(value: object) -> bool:
    """Whether this is a tensor of real numbers, as a parameter is.

    >>> holds_values(torch.ones(1)), holds_values("text")
    (True, False)
    """
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return value.layout == torch.strided and not value.is_complex()


def unwrap(state: Mapping[str, Any], wrapper: str, source: str) -> tuple[str, dict[str, Tensor]]:
    """Extracts the weights of a checkpoint, from its entry ``wrapper`` if it has that entry.

    Returns:
        The prefixes that DistributedDataParallel and ``torch.compile`` put before all keys (empty
        if there is none), and the weights without them.

    Raises:
        UserError: there are no weights, or other values are among them.

    >>> unwrap({"epoch": 3, "state_dict": {"module.fc.bias": torch.ones(1)}}, "state_dict", "")
    ('module.', {'fc.bias': tensor([1.])})
    """
    state = state.get(wrapper, state)
    if not isinstance(state, Mapping) or not state:
        raise UserError(f"{source} holds no weights in {wrapper!r}")
    strange = [k for k, v in state.items() if not isinstance(k, str) or not holds_values(v)]
    remedy = f"it holds weights by key, by themselves or in {wrapper!r}"
    refuse_keys(strange, source, remedy)
    prefix = wrapping(state)
    return prefix, {k.removeprefix(prefix): v for k, v in state.items()}


def wrapping(keys: Collection[str]) -> str:
    """The prefixes that DistributedDataParallel and ``torch.compile`` put before all keys.

    >>> wrapping(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    'module._orig_mod.'
    """
    prefix = ""
    while keys and (more := [w for w in _WRAPPED if all(k.startswith(prefix + w) for k in keys)]):
        prefix += more[0]
    return prefix


def refuse_keys(keys: Collection[Any], source: str, remedy: str) -> None:
    """Raises a ``UserError`` if any ``keys`` are left that belong to no part of a file's layout.

    >>> refuse_keys(["fc.bias"], "the file", "drop it")
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: the file does not fit its layout (unexpected: fc.bias); drop it
    """
    if keys:
        found = ", ".join(map(str, [*keys][:3]))
        raise UserError(f"{source} does not fit its layout (unexpected: {found}); {remedy}")


def misfits(network: nn.Module, weights: Mapping[str, Tensor], prefix: str = "") -> str:
    """Why weights do not exactly fit a network: the first keys of each fault; empty if they fit.

    ``prefix`` is the prefix of these keys in their file.

    >>> misfits(nn.Linear(3, 2), {"weight": torch.ones(2, 4)}, "head.")
    'missing: head.bias; of another shape: head.weight'
    """
    own = network.state_dict()
    faults = {
        "missing": [k for k in own if k not in weights],
        "unexpected": [k for k in weights if k not in own],
        "of another shape": [k for k, v in weights.items() if k in own and own[k].shape != v.shape],
    }
    return "; ".join(
        f"{fault}: {', '.join(prefix + k for k in keys[:3])}"
        for fault, keys in faults.items()
        if keys
    )


def check_fit(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    target: str,
    remedy: str,
    prefix: str = "",
) -> None:
    """Raises a ``UserError`` with the faults that :func:`misfits` finds.

    ``source`` is the kind and name of the file, ``target`` that of the network.

    >>> check_fit(nn.Linear(3, 2), {}, "the file", "the layer", "is it another?")
    Traceback (most recent call last):
    solo_ext.core.errors.UserError: the file does not fit the layer (missing: weight, bias); is...
    """
    if found := misfits(network, weights, prefix):
        raise UserError(f"{source} does not fit {target} ({found}); {remedy}")
