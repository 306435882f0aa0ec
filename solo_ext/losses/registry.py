"""The table of losses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from solo_ext.core.registry import Registry

LOSSES: Registry[Callable[..., Tensor]] = Registry("loss")
