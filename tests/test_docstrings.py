"""The examples of the docstrings run, and where a package is listed each public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import solo_ext

PACKAGES: tuple[str, ...] = (
    "solo_ext.clustering",
    "solo_ext.losses",
    "solo_ext.memory",
    "solo_ext.methods",
)
"""Packages in which every public function and class has an example."""


def _modules() -> list[ModuleType]:
    found = []
    for info in pkgutil.walk_packages(solo_ext.__path__, "solo_ext."):
        if info.name.endswith("__main__"):
            continue
        try:
            found.append(importlib.import_module(info.name))
        except ImportError:
            # DALI and the other host's modules.
            continue
    return found


def test_examples_run() -> None:
    failed = {
        module.__name__: doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed
        for module in _modules()
    }
    assert not [name for name, count in failed.items() if count]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_an_example(package: str) -> None:
    module = importlib.import_module(package)
    lacking = [
        name
        for name in module.__all__
        if callable(value := getattr(module, name)) and ">>>" not in (inspect.getdoc(value) or "")
    ]
    assert not lacking
