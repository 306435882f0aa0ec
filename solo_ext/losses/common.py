"""The registry of losses, and the argument checks that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from solo_ext.core.precision import full_precision
from solo_ext.core.registry import Registry
from solo_ext.kernels.normalized import normalized

LOSSES: Registry[Callable[..., Tensor]] = Registry("loss")


def check_rows(**rows: Tensor) -> None:
    """Raises ValueError unless all tensors, given by name, have the same shape (N, D).

    Example:
        >>> import torch
        >>> x, y = torch.zeros(4, 8), torch.zeros(4, 6)
        >>> check_rows(x=x, y=y)
        Traceback (most recent call last):
        ValueError: x and y must both be (N, D), got (4, 8) and (4, 6)
    """
    shapes = [tuple(x.shape) for x in rows.values()]
    if len(shapes[0]) != 2 or len(set(shapes)) > 1:
        every = {1: "", 2: "both "}.get(len(rows), "all ")
        raise ValueError(f"{_listed(rows)} must {every}be (N, D), got {_listed(shapes)}")


def check_positive(**values: float) -> None:
    """Raises ValueError unless all numbers, given by name, are above 0.

    Example:
        >>> check_positive(temperature=0.0)
        Traceback (most recent call last):
        ValueError: temperature=0.0: must be above 0
    """
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")


def check_not_negative(**values: float) -> None:
    """Raises ValueError unless all numbers, given by name, are at least 0.

    Example:
        >>> check_not_negative(margin=-1)
        Traceback (most recent call last):
        ValueError: margin=-1: must be at least 0
    """
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}: must be at least 0")


def unit_rows(**rows: Tensor) -> tuple[Tensor, ...]:
    """Normalises the rows of tensors of the same shape (N, D), in full precision.

    Raises:
        ValueError: as :func:`check_rows`.

    Example:
        >>> import torch
        >>> z1, z2 = unit_rows(z1=torch.randn(4, 8), z2=torch.randn(4, 8))
        >>> z1.shape, z1.norm(dim=1).allclose(torch.ones(4))
        (torch.Size([4, 8]), True)
    """
    check_rows(**rows)
    return tuple(normalized(x) for x in full_precision(*rows.values()))


def check_table(name: str, table: Tensor, like: Tensor) -> None:
    """Raises ValueError unless the table is (K, D), with D the last dimension of ``like``.

    Example:
        >>> import torch
        >>> check_table("queue", torch.zeros(100, 6), like=torch.zeros(4, 8))
        Traceback (most recent call last):
        ValueError: queue must be (K, 8), got (100, 6)
    """
    if table.ndim != 2 or table.shape[1] != like.shape[-1]:
        raise ValueError(f"{name} must be (K, {like.shape[-1]}), got {tuple(table.shape)}")


def _listed(names: Iterable[object]) -> str:
    *first, last = map(str, names)
    return f"{', '.join(first)} and {last}" if first else last
