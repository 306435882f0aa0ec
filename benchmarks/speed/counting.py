"""Counting what a GPU would have to launch or the host to wait for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    )
)
"""Operations whose result's value or shape the host has to know."""
BY_MASK = frozenset(("aten::index", "aten::index_put", "aten::index_put_"))
"""The same, where an index is a mask."""
NO_LAUNCH = frozenset(
    ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::detach")
)


class Tally(NamedTuple):
    """What was counted.

    Attributes:
        launches: operations that do work on tensors.
        synchronisations: those that make the host wait.
    """

    launches: int
    synchronisations: int


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is on, on any device.

    Attributes:
        launches: operations that do work on tensors.
        waits: names of those that make the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.waits: list[str] = []

    @property
    def tally(self) -> Tally:
        """What was counted so far."""
        return Tally(self.launches, len(self.waits))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0]
        if name in WAITS or (name in BY_MASK and _has_mask(args[1])):
            self.waits.append(name)
        if not func.is_view and name not in NO_LAUNCH:
            self.launches += 1
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def counted(work: Callable[[], Any]) -> Tally:
    """Launches and synchronisations of one call."""
    with Counter() as counter:
        work()
    return counter.tally


@contextmanager
def synchronisations(device: str) -> Iterator[list[str]]:
    """Gives a list that fills with what makes the host wait inside the block.

    On a CPU it counts the operations that would; on a GPU CUDA itself reports them.
    """
    found: list[str] = []
    if device == "cpu":
        with Counter() as counter:
            yield found
        found += counter.waits
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode(before)
    found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]
