"""Methods: modules that assemble losses, heads and state behind solo-learn's interface.

One paper is one file, named as configs name the method. It holds the method's settings, the module,
and a ``training_step`` in the order of the paper's algorithm; start with
:mod:`~solo_ext.methods.pcl`. Shared code stands beside them: :mod:`~solo_ext.methods.registry` is
the table of methods, with what they require of a config and defaults that follow the number of
images; :mod:`~solo_ext.methods.projected` adds a projector to the host's base classes;
:mod:`~solo_ext.methods.contrastive` and :mod:`~solo_ext.methods.distillation` are the two families'
common steps; :mod:`~solo_ext.methods.e_step` clusters the training set between epochs. A method's
module is imported when the method is registered or asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from solo_ext.methods.registry import METHODS

_MODULES = {
    "Debiased": "debiased",
    "HardNegative": "hard_negative",
    "Metric": "metric",
    "MoCHi": "mochi",
    "NNCLRSymmetric": "nnclr_symmetric",
    "PCL": "pcl",
    "ProtoCPC": "protocpc",
    "ProtoSEED": "protoseed",
    "SEED": "seed",
}
"""The module that holds each class; modules are named as configs name the method."""

__all__ = ["METHODS", "load_all", *_MODULES]


def load_all() -> dict[str, BaseException]:
    """Imports every method, which registers it.

    Returns:
        The error of each method that the installed solo-learn cannot run, by the method's name.

    Example:
        >>> load_all(), "debiased" in METHODS
        ({}, True)
    """
    failed: dict[str, BaseException] = {}
    for name in _MODULES.values():
        try:
            importlib.import_module(f"solo_ext.methods.{name}")
        except (Exception, SystemExit) as error:
            failed[name] = error
    return failed


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"solo_ext.methods.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
