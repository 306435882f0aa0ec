"""solo-learn 1.0.2 on a current stack, behind the interface of its main branch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from solo_ext.host.release_1_0_2.aliases import legacy_imports


def load() -> ModuleType:
    """Imports ``solo`` with its base class replaced and its built-ins taking main's config.

    Returns:
        The module ``solo``; ``solo.methods.METHODS`` holds the adapted classes.
    """
    from solo_ext.host.release_1_0_2 import base

    replacement: Any = ModuleType("solo.methods.base")
    replacement.BaseMethod = base.BaseMethod
    replacement.BaseMomentumMethod = base.BaseMomentumMethod
    # An earlier import of solo left a half-made package, so it is imported afresh.
    for name in [n for n in sys.modules if n == "solo" or n.startswith("solo.")]:
        del sys.modules[name]
    sys.modules["solo.methods.base"] = replacement
    with legacy_imports():
        solo = importlib.import_module("solo")
    solo.methods.base = replacement

    from solo_ext.host.release_1_0_2.natives import Whitening2d, natives

    for name in ("solo.utils.whitening", "solo.methods.wmse"):
        sys.modules[name].Whitening2d = Whitening2d  # type: ignore[attr-defined]
    base.BaseMethod._BACKBONES.update(_backbones())
    made = natives(solo.methods.METHODS)
    solo.methods.METHODS.update(made)
    for own in made.values():
        setattr(solo.methods, own.__name__, own)
    return solo


def _backbones() -> dict[str, Any]:
    """The release's own backbones, called as main calls its: the method's name comes first."""
    own = importlib.import_module("solo.utils.backbones")
    resnets = importlib.import_module("torchvision.models")
    found = {f"resnet{depth}": getattr(resnets, f"resnet{depth}") for depth in (18, 50)}
    for family in ("vit", "swin"):
        for size in ("tiny", "small", "base", "large"):
            found[f"{family}_{size}"] = getattr(own, f"{family}_{size}")
    return {name: _after_method(make) for name, make in found.items()}


def _after_method(make: Any) -> Any:
    return lambda method=None, **kwargs: make(**kwargs)
