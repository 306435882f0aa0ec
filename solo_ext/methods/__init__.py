"""Methods: modules that assemble losses, heads and state behind solo-learn's interface.

Each paper has one file with the name of its method in configs. The file holds the method's
settings, the module, and a ``training_step`` in the order of the paper's algorithm (the contrastive
methods share one module and its step); start with :mod:`~solo_ext.methods.pcl`. Other files hold
shared code: :mod:`~solo_ext.methods.registry` the table of methods, shared checks of a config, and
defaults that depend on the number of images; :mod:`~solo_ext.methods.projected` base classes with a
projector; :mod:`~solo_ext.methods.contrastive` the step of the contrastive methods;
:mod:`~solo_ext.methods.distillation` the base class of SEED and ProtoSEED;
:mod:`~solo_ext.methods.e_step` the clustering of the training set between epochs. A method's module
is imported when the method is registered or accessed.
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
"""The module of each class; it has the name of the method in configs."""

__all__ = ["METHODS", "load_all", *_MODULES]


def load_all() -> dict[str, BaseException]:
    """Imports and thereby registers every method.

    Returns:
        The error of each method that cannot be imported, by the method's name.

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
