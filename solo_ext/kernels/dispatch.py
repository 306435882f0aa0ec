"""Chooses the form of an operation (plain, in tiles, or a Triton kernel) and the size of tiles.

All forms compute the same. On a CPU the size of the matrix decides, by thresholds that were
measured. On a GPU the forms that fit the memory are timed once for each shape, as
``torch.backends.cudnn.benchmark`` does with convolutions; checkpoints store the choices, so that a
resumed run computes the same numbers.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Form = Literal["plain", "tiles", "fused"]
T = TypeVar("T")

LARGEST_SHARE = 1 / 4
"""On a GPU, whole matrices of similarities may take up to this share of the free memory."""
_MATRICES = 3
"""Matrices that the plain form holds at once: similarities, exponentials, and their gradient."""
_CACHED = {
    "two_views": 2**24,
    "batch_contrast": 2**18,
    "prototype_contrast": 2**16,
    "mixed_logsumexp": 0,
}
"""On a CPU, the plain form runs if the matrix has at most so many bytes; tiles are slower there.

Measured with one thread. Tiles that compute gradients in the forward pass are faster from smaller
sizes on, because they overwrite matrices that autograd would keep.
"""
_CACHED_ELSE = 2**19
_TILE_BYTES = {"cpu": 2**20, "cuda": 2**25}
"""Bytes of a tile: it should fit the cache of a CPU core, or be large enough to keep a GPU busy."""
_CALLS = 5
WIDEST = 256
"""Largest D of the Triton kernels, which keep a block of rows in registers and shared memory."""

_choices: dict[str, str] = {}


def choices() -> dict[str, str]:
    """The choices made by timing so far in this process, by operation, device and shapes.

    Example:
        >>> choices()
        {}
    """
    return dict(_choices)


def restore_choices(made: Mapping[str, str]) -> None:
    """Adopts the choices of an earlier process, which are then not timed again.

    Example:
        >>> restore_choices({})
    """
    _choices.update(made)


def run(
    operation: str,
    forms: Mapping[Form, Callable[..., T]],
    inputs: Sequence[Tensor],
    columns: int,
    *details: object,
) -> T:
    """Runs the chosen form on the inputs.

    While ``torch.compile`` traces a graph, this is ``plain``, which the compiler fuses by itself.
    On a GPU under ``torch.use_deterministic_algorithms`` nothing is timed: ``fused`` runs if it is
    given, else ``plain`` if its matrices fit into :data:`LARGEST_SHARE` of all memory, else
    ``tiles``.

    Args:
        operation: name of the operation, for messages and checkpoints.
        forms: functions of the inputs, which return one tensor or several, of which the first has
            a gradient; ``plain`` and ``tiles`` at least.
        inputs: (..., N, D) rows that are compared, then all other tensors that may get a gradient.
        columns: number of rows that those of the first input are compared with.
        details: what else the time depends on, such as the dtype of factors.

    Example:
        >>> forms = {"plain": torch.square, "tiles": lambda x: x * x}
        >>> run("square", forms, [torch.tensor([[3.0]])], columns=1)
        tensor([[9.]])
    """
    return forms[_form(operation, forms, inputs, columns, details)](*inputs)


def has_fused(rows: Tensor) -> bool:
    """Whether the Triton kernels support these rows (N, D), by device, dtype and width.

    Example:
        >>> has_fused(torch.zeros(4, 8))
        False
    """
    fits = rows.dtype == torch.float32 and rows.numel() > 0 and rows.shape[1] <= WIDEST
    return _on_gpu(rows) and fits and importlib.util.find_spec("triton") is not None


def _form(
    operation: str,
    forms: Mapping[Form, Callable[..., Any]],
    inputs: Sequence[Tensor],
    columns: int,
    details: Sequence[object],
) -> Form:
    first = inputs[0]
    size = math.prod(first.shape[:-1]) * columns * first.element_size()
    if torch.compiler.is_compiling():
        return "plain"
    if not _on_gpu(first):
        return "plain" if size <= _CACHED.get(operation, _CACHED_ELSE) else "tiles"
    if first.is_meta or torch.are_deterministic_algorithms_enabled():
        if "fused" in forms:
            return "fused"
        return "plain" if first.is_meta or _fits(size, first, False) else "tiles"
    wanted = [x.requires_grad and torch.is_grad_enabled() for x in inputs]
    place = torch.cuda.get_device_name(first.device)
    shapes = [*(tuple(x.shape) for x in inputs), columns, first.dtype, *details]
    key = f"{operation} on {place}: {', '.join(map(str, shapes))}, gradients {wanted}"
    found: Any = _choices.get(key)
    if found not in forms:
        found = _choices[key] = _fastest(key, forms, inputs, size)
    return found  # type: ignore[no-any-return]


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _fits(size: int, like: Tensor, now: bool) -> bool:
    """Whether the plain form's matrices of ``size`` bytes fit their share of free or all memory."""
    free, total = torch.cuda.mem_get_info(like.device)
    held = torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    return _MATRICES * size <= LARGEST_SHARE * (free + held if now else total)


def _fastest(
    key: str, forms: Mapping[Form, Callable[..., Any]], inputs: Sequence[Tensor], size: int
) -> Form:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        # Every form would fail, and the choice would stay.
        raise RuntimeError(f"{key}: the forms are not timed yet, and a graph is being recorded")
    times: dict[Form, float] = {}
    for name, form in forms.items():
        if name == "plain" and not _fits(size, inputs[0], True):
            continue
        try:
            times[name] = _milliseconds(form, inputs)
        except Exception as error:  # if this GPU cannot run one form, another one may work
            logger.warning("%s: %s fails and is left out: %s", key, name, error)
    # If all forms fail, run tiles once more, so that the step raises the error.
    best = min(times, key=times.__getitem__) if times else "tiles"
    shown = ", ".join(f"{name} {time:.3f} ms" for name, time in times.items())
    logger.info("%s: %s (%s)", key, best, shown)
    return best


def with_gradients(form: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Runs a form and its backward pass, on detached inputs so that no ``.grad`` is written.

    Example:
        >>> with_gradients(torch.square, [torch.ones(2, 1, requires_grad=True)])
    """
    given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    found = form(*given)
    first = found if isinstance(found, Tensor) else found[0]
    learners = [x for x in given if x.requires_grad]
    if learners and first.requires_grad:
        torch.autograd.grad(first.sum(), learners, allow_unused=True)


def _milliseconds(form: Callable[..., Any], inputs: Sequence[Tensor]) -> float:
    """Fastest of a few forward and backward passes; waits for the device."""
    times: list[float] = []
    for _ in range(2 + _CALLS):  # the first two calls compile the form and fill caches
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        with_gradients(form, inputs)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[2:])


def tile_rows(x: Tensor, columns: int, least: int, share: int = 1) -> int:
    """Number of rows of a tile with ``columns`` columns, for the device and dtype of ``x``.

    It is at least ``least``; the tile may take ``share`` times the usual budget of memory.

    Example:
        >>> tile_rows(torch.zeros(8, 128), columns=1024, least=64)
        256
    """
    budget = _TILE_BYTES.get(x.device.type, _TILE_BYTES["cuda"]) * share
    return max(budget // (x.element_size() * max(columns, 1)), least)


def tiles_of(count: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``count`` rows in order; the last one may be shorter.

    Example:
        >>> [(part.start, part.stop) for part in tiles_of(5, 2)]
        [(0, 2), (2, 4), (4, 5)]
    """
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def cut(x: Tensor, part: slice, dim: int = 0) -> Tensor:
    """A part of a tensor, and the tensor itself if that is all of it, which saves a view.

    Example:
        >>> x = torch.zeros(5, 2)
        >>> cut(x, slice(0, 2)).shape, cut(x, slice(0, 5)) is x, cut(x, slice(None)) is x
        (torch.Size([2, 2]), True, True)
    """
    size = x.shape[dim]
    begin, end, _ = part.indices(size)
    return x if end - begin == size else x.narrow(dim, begin, end - begin)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a ``backward`` raise RuntimeError if its result would be differentiated again.

    torch's decorator of the same name does not raise if the incoming gradient is a constant, as it
    is for a loss, and the second derivative is then wrong.

    Example:
        >>> once_differentiable(lambda ctx, gradient: 2 * gradient)(None, torch.ones(1))
        Traceback (most recent call last):
            ...
        RuntimeError: this operation cannot be differentiated twice (create_graph=True): ...
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        # Autograd enables gradients in a backward pass only for create_graph=True.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "this operation cannot be differentiated twice (create_graph=True): it takes its "
                "gradient by hand; a loss's plain form can be, such as "
                "solo_ext.losses.contrastive.plain_contrastive"
            )
        return backward(ctx, *gradients)

    return checked
