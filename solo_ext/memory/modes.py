"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*roots: nn.Module) -> Iterator[None]:
    """Puts modules into eval mode inside the block and restores every submodule's own mode."""
    # Not module.train(mode): it would thaw submodules that were frozen in eval mode.
    modes = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
