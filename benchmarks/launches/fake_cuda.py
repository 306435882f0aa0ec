"""Tensors on a CUDA device that is not there, with autocast and backward passes as on one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, tensors have no data, and those on "cuda" need neither a GPU nor its driver.

    Autocast decides as on a GPU with bfloat16, though ``torch.cuda.is_available()`` stays as it is.
    Backward passes take the same nodes as usual, called from here: torch's own engine would ask the
    driver for streams.
    """
    with contextlib.ExitStack() as patches:
        for name, value in (
            ("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
            ("torch.cuda.is_bf16_supported", lambda *_, **__: True),
            ("torch.autograd._engine_run_backward", run_backward),
            ("torch.Generator", HostGenerator),
            ("torch.Tensor.pin_memory", lambda x: x),
            ("torch._C._conv_determine_backend_memory_format", cudnn_layout),
            # Optimisers look for exact types before they take many parameters at a time.
            ("torch.optim.optimizer._foreach_supported_types", [Tensor, Parameter, FakeTensor]),
        ):
            patches.enter_context(patch(name, value))
        patches.enter_context(FakeTensorMode())
        yield


class HostGenerator(torch.Generator):
    """A generator that stands in for those of GPUs, because nothing is drawn."""

    def __new__(cls, *_: Any, **__: Any) -> HostGenerator:
        return super().__new__(cls, device="cpu")


def cudnn_layout(x: Tensor, weight: Tensor, *_: Any) -> torch.memory_format:
    """Layout of a convolution's results, which torch leaves to a library that is not there."""
    wanted = [suggest_memory_format(t) for t in (x, weight) if t.ndim == 4]
    return torch.channels_last if torch.channels_last in wanted else torch.contiguous_format


def run_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor] = (),
    *_: Any,
    accumulate_grad: bool = False,
    **__: Any,
) -> tuple[Tensor | None, ...]:
    """What torch's engine computes, on one thread; without the hooks of tensors and nodes."""
    roots = [get_gradient_edge(t) for t in outputs]
    wanted = [get_gradient_edge(t) for t in inputs]
    missing = _edges_into(edge.node for edge in roots)
    held: dict[Any, dict[int, Tensor]] = {}
    found: list[Tensor | None] = [None] * len(wanted)

    def give(node: Any, place: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        like, own = node._input_metadata[place], held.setdefault(node, {})
        # Broadcast factors and products under autocast.
        gradient = gradient.sum_to_size(like.shape).to(like.dtype)
        own[place] = own[place] + gradient if place in own else gradient

    for edge, gradient in zip(roots, gradients, strict=True):
        give(edge.node, edge.output_nr, gradient)
    ready = [node for node in dict.fromkeys(e.node for e in roots) if not missing.get(node)]
    # Training calls it outside of autocast.
    with torch.set_grad_enabled(create_graph), torch.autocast("cuda", enabled=False):
        while ready:
            node = ready.pop()
            given = held.pop(node, {})
            for place, edge in enumerate(wanted):
                if edge.node is node:
                    found[place] = given.get(edge.output_nr)
            if hasattr(node, "variable"):
                if accumulate_grad and given:
                    leaf = node.variable
                    leaf.grad = given[0] if leaf.grad is None else leaf.grad + given[0]
                continue
            results = iter(_called(node, given) if given else ())
            for following, place in node.next_functions:
                result = next(results, None)
                if following is not None:
                    give(following, place, result)
                    missing[following] -= 1
                    if not missing[following]:
                        ready.append(following)
    return tuple(found)


def _edges_into(nodes: Any) -> dict[Any, int]:
    """How many edges lead into each node that can be reached."""
    missing: dict[Any, int] = {}
    stack = list(dict.fromkeys(nodes))
    seen = set(stack)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                missing[following] = missing.get(following, 0) + 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    return missing


def _called(node: Any, given: dict[int, Tensor]) -> list[Tensor | None]:
    """Gradients to the inputs of a node, in the order of its edges."""
    expected = node._input_metadata
    gradients = [given.get(place) for place in range(len(expected))]
    if not hasattr(node, "apply"):
        results = node(*gradients)
        return list(results) if isinstance(results, tuple) else [results]
    # A torch.autograd.Function: its results are of all arguments, its edges of tensors alone.
    whole = [
        torch.zeros(like.shape, dtype=like.dtype, device=like.device) if g is None else g
        for g, like in zip(gradients, expected, strict=True)
    ]
    results = node.apply(*whole)
    results = results if isinstance(results, tuple) else (results,)
    needed = (r for r, need in zip(results, node.needs_input_grad, strict=True) if need)
    return [None if edge is None else next(needed) for edge, _ in node.next_functions]
