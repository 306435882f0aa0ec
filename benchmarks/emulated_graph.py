"""A CUDA graph's rules on a CPU: operations alone are replayed, on tensors that stay in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount")
UNDECLARED_WRITES = {"native_batch_norm": (3, 4)}
"""Running statistics, of which the operation's schema does not tell."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every operation with its tensors; refuses those that the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.written: list[tuple[Tensor, Tensor]] = []
        """Tensors that were written to, with their values before."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, given = func.name().removeprefix("aten::").partition(".")[0], dict(kwargs or {})
        masks = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_flatten(args[1])[0]
        )
        if name in HOST_READS or masks:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        self.written += [(x, x.clone()) for x in _written(func, name, args, given)]
        found = func(*args, **given)
        self.held.append((func, args, given, found))
        return found


def _written(func: Any, name: str, args: Sequence[Any], given: dict[str, Any]) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else given.get(argument.name)
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or place in UNDECLARED_WRITES.get(name, ()):
            yield from (x for x in tree_flatten(value)[0] if isinstance(x, Tensor))


class EmulatedGraph:
    """Replays the operations of a step."""

    def __init__(self, operations: _Operations) -> None:
        self.operations = operations

    def replay(self) -> None:
        """Does all operations again, on the tensors of the recording."""
        # A dispatch mode that counts sees the host's operations alone.
        with _disable_current_modes(), torch.inference_mode():
            for func, args, kwargs, found in self.operations.held:
                again = func(*args, **kwargs)
                given = {_place(x) for x in tree_flatten((args, kwargs))[0]}
                for old, new in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                    # Views, and what is written in place, have the tensors of the recording.
                    if isinstance(old, Tensor) and _place(old) not in given:
                        old.copy_(new)


def emulated_graph(
    step: Callable[[], None], generators: Sequence[torch.Generator], after: Any
) -> EmulatedGraph:
    """Records a step as a GPU does: nothing is written or drawn until the first replay."""
    drawn_from = [torch.default_generator, *generators]
    states = [generator.get_state() for generator in drawn_from]
    operations = _Operations()
    try:
        with operations:
            step()
    finally:
        # Frozen networks run in inference mode, outside of which their tensors cannot be written.
        with torch.inference_mode():
            for tensor, before in reversed(operations.written):
                tensor.copy_(before)
        for generator, state in zip(drawn_from, states, strict=True):
            generator.set_state(state)
    return EmulatedGraph(operations)


def _place(x: Any) -> int | None:
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None
