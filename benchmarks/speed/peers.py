"""Other libraries, as far as they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.interleaved import Work
from benchmarks.speed.effort import Effort

NOT_IMPLEMENTED = "not implemented"
NOT_COMPILED = "not compiled with --quick"


def installed(module: str) -> bool:
    """Whether a library is there."""
    return importlib.util.find_spec(module) is not None


def not_installed(name: str) -> str:
    """What the table says of a peer that is not."""
    return f"peer not installed: {name}"


def peer(module: str, make: Callable[[Any], Work]) -> Work | str:
    """A call of a library that may be missing, made with the module of that name."""
    library = module.partition(".")[0]
    if not installed(library):
        return not_installed(library)
    return make(importlib.import_module(module))


def compiled(effort: Effort, function: Callable[..., Any], *args: Any) -> Work | str:
    """``function(*args)`` under torch.compile."""
    if not effort.compiled:
        return NOT_COMPILED
    made = torch.compile(function, dynamic=False)
    return lambda: made(*args)
