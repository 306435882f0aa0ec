"""solo-learn's main branch; its own interface is the one that plugin methods are written to."""

from __future__ import annotations

import importlib
from types import ModuleType


def load() -> ModuleType:
    """Imports ``solo`` with the submodules that the plugin touches."""
    solo = importlib.import_module("solo")
    for name in ("methods", "losses", "data.pretrain_dataloader", "data.classification_dataloader"):
        importlib.import_module(f"solo.{name}")
    return solo
