"""The seam to solo-learn: the only place that knows which generation is installed.

``BaseMethod`` and ``BaseMomentumMethod`` have the interface of solo-learn's main branch on both
generations; taking either loads the host.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solo_ext.core.errors import HostError
from solo_ext.host.builtin_kwargs import BUILTIN_KWARGS, MOMENTUM_METHODS
from solo_ext.host.detect import HostInfo, detect

if TYPE_CHECKING:
    from solo_ext.host.release_1_0_2.base import BaseMethod
    from solo_ext.host.release_1_0_2.momentum import BaseMomentumMethod

    initialize_momentum_params: Any

__all__ = [
    "BUILTIN_KWARGS",
    "MOMENTUM_METHODS",
    "BaseMethod",
    "BaseMomentumMethod",
    "Host",
    "HostError",
    "HostInfo",
    "detect",
    "load",
]


@dataclass(frozen=True)
class Host:
    """A loaded host.

    Attributes:
        info: which one.
        methods: ``solo.methods.METHODS``, name to class; every class takes main's config.
        backbones: constructors by name, answering for ``timm/<model>`` too.
        solo: the module ``solo``.
    """

    info: HostInfo
    methods: dict[str, type]
    backbones: dict[str, Any]
    solo: Any


_loaded: Host | None = None


@contextlib.contextmanager
def _timm_registry_kept() -> Iterator[None]:
    """main registers its own ConvNeXts and PoolFormers over timm's; ``timm/...`` means timm's."""
    from timm.models import _registry

    # Names of models and of their weights; those that main adds stay.
    tables: list[Any] = [
        table
        for name, table in vars(_registry).items()
        if name.startswith("_model") and isinstance(table, dict | set)
    ]
    held = [copy.copy(table) for table in tables]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overwriting .* in registry.*")
        warnings.filterwarnings("ignore", ".*custom_fwd.*")
        warnings.filterwarnings("ignore", "Importing from timm.*", FutureWarning)
        yield
    for table, own in zip(tables, held, strict=True):
        table.update(own)


def load() -> Host:
    """Imports the installed solo-learn once and applies the patches that change no number.

    Raises:
        HostError: none is installed, or it cannot be imported.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    info = detect()
    if info.generation == "main":
        from solo_ext.host.main import load as load_generation
    else:
        from solo_ext.host.release_1_0_2 import load as load_generation
    try:
        with _timm_registry_kept():
            solo = load_generation()
    except ImportError as error:
        raise HostError(
            f"solo-learn ({info.generation}) in {info.path} cannot be imported: {error}; install "
            "what is missing, `solo-ext doctor` lists it"
        ) from error
    from solo_ext.host.patches import apply_all

    apply_all()
    base = solo.methods.base
    _loaded = Host(info, solo.methods.METHODS, base.BaseMethod._BACKBONES, solo)
    return _loaded


def __getattr__(name: str) -> Any:
    if name in ("BaseMethod", "BaseMomentumMethod"):
        return getattr(load().solo.methods.base, name)
    if name == "initialize_momentum_params":
        return load().solo.utils.momentum.initialize_momentum_params
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
