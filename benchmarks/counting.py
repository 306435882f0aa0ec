"""Counting what a GPU would have to launch, or the host to wait for."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = frozenset(
    (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::equal",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::bincount",
    )
)
"""Operations whose result's value or shape the host has to know."""
BY_MASK = frozenset(("aten::index", "aten::index_put", "aten::index_put_"))
"""The same, where an index is a mask."""
BY_COUNTS = "aten::repeat_interleave"
"""The same, where the length of the result is not given."""
MADE = "aten::lift_fresh"
"""A tensor that is made from the host's values."""
MOVES = ("aten::_to_copy", "aten::copy_")
"""Copies, from one device to another if their tensors tell so."""
READS = ("tolist", "cpu", "numpy")
"""Methods that bring a tensor to the host, of which a CPU dispatches nothing."""
NO_LAUNCH = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("detach", "_unsafe_view", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_"),
    )
)
KERNELS = {"solo_ext::fused_logsumexp": 2, "solo_ext::fused_nearest": 4}
"""Kernels of our own operations that start several."""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that do work on tensors, host waits and copies, on any device.

    A tensor's ``to`` counts as a wait where it names the string ``cpu``: on a CPU a device that is
    passed on is the one that training runs on. Copies are those between devices, and tensors that
    are made from the host's values, which a GPU would have to be sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.waits: list[str] = []
        self.copies: list[str] = []
        self._patches = contextlib.ExitStack()
        self._reading = False

    def __enter__(self) -> Counter:
        for name in (*READS, "to"):
            # Inherited: what shadows them is taken away again.
            setattr(Tensor, name, self._noted(name, getattr(Tensor, name)))
            self._patches.callback(delattr, Tensor, name)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *args: Any) -> None:
        self._patches.close()
        super().__exit__(*args)

    def _noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            outer, to_host = self._reading, name != "to" or _to_host(args, kwargs)
            if to_host and not outer:
                self.waits.append(f"Tensor.{name}")
            # What it calls in turn is no second wait.
            self._reading = outer or to_host
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self._reading = outer

        return read

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, given = func.name().partition(".")[0], kwargs or {}
        waits = (
            name in WAITS
            or (name in BY_MASK and any(_is_mask(index) for index in args[1]))
            or (name == BY_COUNTS and given.get("output_size") is None)
        )
        if waits and not self._reading:
            self.waits.append(name)
        if name == MADE or (name in MOVES and _between_devices(args, given)):
            self.copies.append(name)
        if not func.is_view and name not in NO_LAUNCH:
            self.launches += KERNELS.get(name, 1)
        return func(*args, **given)


def _to_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    wanted = kwargs.get("device", args[0] if args else None)
    return isinstance(wanted, str) and wanted == "cpu"


def _between_devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy into or of the first argument leaves its device."""
    devices = {x.device.type for x in args if isinstance(x, Tensor)}
    if kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    return len(devices) > 1


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def counted(work: Callable[[], Any]) -> Counter:
    """The counts of one call."""
    with Counter() as counter:
        work()
    return counter


@contextlib.contextmanager
def forms_of_a_gpu() -> Iterator[None]:
    """Inside, operations on meta tensors, which hold no data, take the forms that a GPU would take.

    What waits for a value raises there.
    """
    with patch("solo_ext.kernels.dispatch._on_gpu", lambda _: True):
        yield


@contextlib.contextmanager
def waits_of_cuda() -> Iterator[list[str]]:
    """Gives a list that fills with the waits inside the block that CUDA itself reports."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode(before)
    found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]
