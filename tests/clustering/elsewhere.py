"""Tensors on a device that is not there: computed on the CPU, and never beside tensors of the CPU.

As a GPU would, every operation refuses tensors of two devices; only a copy leads from one to the
other.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")
"""Nobody has one, and torch asks no driver for it."""


class Held(Tensor):
    """Stands for a tensor of the device, whose values are in ``held``."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        made: Held = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    def new_tensor(self, data: Any) -> Tensor:
        return Held(self.held.new_tensor(data))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """Within it the device is there."""

    def __enter__(self) -> Any:
        made = torch.tensor

        def tensor(data: Any, device: Any = None, **options: Any) -> Tensor:
            """torch would make it on the real device, and ask no mode."""
            return made(data, **options).to(device)

        # It knows this device no more than torch's function does.
        autocast = patch("torch.autocast", lambda *_, **__: contextlib.nullcontext())
        self._patches = [patch("torch.tensor", tensor), autocast]
        for one in self._patches:
            one.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for one in self._patches:
            one.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device of its tensors."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in given if isinstance(x, Held)]
    device = kwargs.get("device")
    to = bool(there) if device is None else torch.device(device).type == DEVICE.type
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if there and not copies and any(x.ndim for x in given if not isinstance(x, Held)):
        raise RuntimeError(f"{func}: tensors of two devices")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = tree_map_only(Held, lambda x: x.held, (args, kwargs))
    found = func(*plain[0], **plain[1])
    # What an operation writes into is the tensor that it was given.
    own = {id(x.held): x for x in there}
    if func is torch.ops.aten.copy_.default:
        return args[0]
    if not to:
        return found
    return tree_map_only(Tensor, lambda x: own[id(x)] if id(x) in own else Held(x), found)
