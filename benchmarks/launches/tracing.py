"""Counts what a GPU would have to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.speed.counting import NO_LAUNCH, host_waits

aten: Any = torch.ops.aten

COMPOSED = get_decompositions(
    [aten.logsumexp, aten.select_backward, aten.slice_backward, aten.diagonal_backward]
)
"""Operations without a kernel of their own, as those that they are made of."""
WRITES_ALL = ("fill_", "zero_", "copy_", "uniform_", "random_", "normal_", "bernoulli_")
"""Operations that do not read what they overwrite."""
PICKS = (
    "index",
    "index_select",
    "gather",
    "embedding",
    "_embedding_bag_forward_only",
    "nll_loss_forward",
)
"""Operations that read of their first tensor no more than they pick."""
UNREAD = (("nll_loss_backward", "self"), ("max_pool2d_with_indices_backward", "self"))
"""Arguments of which the shape alone is read."""
PUTS = ("scatter", "scatter_add", "index_put", "index_add", "index_copy", "index_fill")
"""Operations that write no more than the rows that they are given."""
PASSES = {
    # Digits of a radix selection and of a radix sort.
    "topk": 5,
    "sort": 8,
    # Sums over the batch first.
    **dict.fromkeys(("cudnn_batch_norm", "native_batch_norm"), 2),
    **dict.fromkeys(("cudnn_batch_norm_backward", "native_batch_norm_backward"), 2),
}
"""Reads of the input by operations that need several."""


LAUNCHES = {"solo_ext::fused_logsumexp": 2, "solo_ext::fused_nearest": 4}
"""Kernels of our own operations that are several; each counts its inputs and results once."""
SPLIT = 3
"""Products in TF32 that our own operations make of one in fp32."""


class Kernel(NamedTuple):
    """An operation that a GPU would have to launch.

    Attributes:
        name: of the operation.
        bytes: that it reads and writes.
        flops: of its matrix product.
        kind: of the product's factors.
        copies: whether it copies between host and device.
        waits: whether the host has to know its result.
    """

    name: str
    bytes: int
    flops: int = 0
    kind: str = ""
    copies: bool = False
    waits: bool = False


class Cost(list[Kernel]):
    """What one call does, in order."""

    @property
    def bytes(self) -> int:
        """Read and written."""
        return sum(kernel.bytes for kernel in self)

    @property
    def flops(self) -> dict[str, int]:
        """Of matrix products, by the kind of their factors."""
        found: Counter[str] = Counter()
        for kernel in self:
            found[kernel.kind] += kernel.flops
        return {kind: flops for kind, flops in sorted(found.items()) if flops}

    @property
    def copies(self) -> int:
        """How many go between host and device."""
        return sum(kernel.copies for kernel in self)

    @property
    def waits(self) -> list[str]:
        """Operations that the host waits for."""
        return [kernel.name for kernel in self if kernel.waits]


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is done on CUDA while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **given)
        name = func.name().partition(".")[0]
        if name == "aten::_local_scalar_dense":
            self.cost.append(Kernel(name, _bytes(args[0]), copies=True, waits=True))
            # What a gradient scaler reads where no gradient was infinite.
            return (
                False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
            )
        try:
            result = func(*args, **given)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.cost.append(Kernel(name, _bytes(args[0]), copies=True, waits=True))
            raise
        tensors = [x for x in tree_leaves((args, given, result)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors}
        if name.startswith("prim::") or "cuda" not in devices:
            return result
        if not func.is_view and name not in NO_LAUNCH:
            copies = "copy" in name and "cpu" in devices
            blocks = copies and not _non_blocking(func, args, given)
            waits = blocks or host_waits(name, args, given)
            moved = sum(_moved(func, args, given, result))
            product = _product(func, args, given, result)
            # Empty tensors launch nothing.
            if moved:
                self.cost.append(Kernel(name, moved, *product, copies, waits))
                self.cost += [Kernel(name, 0)] * (LAUNCHES.get(name, 1) - 1)
        return result


def cost_of(work: Callable[[], Any]) -> Cost:
    """What one call on fake CUDA tensors does; it ends where the host needs a value to go on."""
    with suppress(DataDependentOutputException, DynamicOutputShapeException), Tracer() as tracer:
        work()
    return tracer.cost


def _non_blocking(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **given}.get("non_blocking"))


def _moved(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[int]:
    """Bytes of each tensor that an operation reads or writes, those on the device alone."""
    name = func.overloadpacket.__name__
    base = name.removesuffix("_")
    schema = func._schema.arguments
    values = [*args, *(kwargs.get(a.name) for a in schema[len(args) :])]
    # What picks or puts rows touches as much as the other operand or the result has.
    rows = [x for x in tree_leaves(result if base in PICKS else values[1:]) if _on_gpu(x)]
    for place, (argument, value) in enumerate(zip(schema, values, strict=True)):
        written = argument.alias_info is not None and argument.alias_info.is_write
        for x in filter(_on_gpu, tree_leaves(value)):
            whole = _bytes(x)
            if place == 0 and (base in PICKS or (base in PUTS and written)):
                whole = min(whole, sum(map(_bytes, rows)))
            unread = argument.is_out or (base, argument.name) in UNREAD
            unread |= written and name in WRITES_ALL
            yield whole * (written + (0 if unread else PASSES.get(base, 1)))
    if not any(a.alias_info is not None and a.alias_info.is_write for a in schema):
        yield from (_bytes(x) for x in tree_leaves(result) if _on_gpu(x))


def _product(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, str]:
    """FLOPs of a matrix product, and the kind of its factors."""
    packet = func.overloadpacket
    packet = getattr(aten, packet.__name__.removesuffix("_"), packet)
    if packet not in flop_registry:
        return 0, ""
    flops = flop_registry[packet](*args, **kwargs, out_val=result)
    if func.namespace != "aten":
        # Ours say what they multiply in; fp32 is split, others say nothing and take bfloat16.
        named = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.dtype)]
        kind = str(named[0] if named else torch.bfloat16).removeprefix("torch.")
        return (SPLIT * flops, "tf32") if kind == "float32" else (flops, kind)
    dtype = next(x for x in reversed(tree_leaves(args)) if isinstance(x, Tensor)).dtype
    kind = str(dtype).removeprefix("torch.")
    backend: Any = (
        torch.backends.cudnn.conv if "conv" in packet.__name__ else torch.backends.cuda.matmul
    )
    if kind == "float32" and backend.fp32_precision == "tf32":
        kind = "tf32"
    return flops, kind


def _on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cuda"


def _bytes(x: Tensor) -> int:
    """Of its elements in memory, those that are repeated by an expansion counted once."""
    held = math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return held * x.element_size() if x.numel() else 0
