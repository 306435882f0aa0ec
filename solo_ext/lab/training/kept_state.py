"""A method's state as it was before a step, for a step that is to leave no trace."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from solo_ext.memory.state import Unsynchronised


class BufferSnapshot:
    """A second copy of all buffers: running statistics, queues, priors, memories.

    Parameters are no part of it: a step without gradients leaves them to the optimiser alone.

    Args:
        root: the method. Its frozen subtrees are left out.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._held: dict[tuple[nn.Module, str], Tensor] = {}

    @torch.no_grad()
    def hold(self) -> None:
        """Keeps the buffers as they are now."""
        found = dict(self._buffers())
        known = {k for k, v in self._held.items() if k in found and _alike(v, found[k])}
        self._held = {k: self._held[k] if k in known else v.clone() for k, v in found.items()}
        if known:
            held, now = ([side[k] for k in known] for side in (self._held, found))
            torch._foreach_copy_(held, now)

    @torch.no_grad()
    def restore(self, bad: Tensor) -> None:
        """Puts back what was kept, on the device and without a look at ``bad``.

        Args:
            bad: scalar, of bool: whether to.
        """
        # Looked up by name: some methods put a new tensor in the place of the old one.
        for key, now in self._buffers():
            held = self._held.get(key)
            if held is not None and _alike(held, now):
                torch.where(bad, held, now, out=now)

    def _buffers(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        frozen = {
            part
            for module in self._root.modules()
            if isinstance(module, Unsynchronised) and module.frozen
            for part in module.modules()
        }
        for module in self._root.modules():
            if module not in frozen:
                for name, buffer in module.named_buffers(recurse=False):
                    yield (module, name), buffer.detach()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
