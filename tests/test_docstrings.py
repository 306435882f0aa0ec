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
WHOLE: tuple[str, ...] = (
    "solo_ext.clustering",
    "solo_ext.data",
    "solo_ext.host",
    "solo_ext.kernels",
    "solo_ext.losses",
    "solo_ext.memory",
    "solo_ext.pretrained",
)
"""Packages whose modules are imported one by one, and so have an example for each name."""
NEEDS_MORE = ("backends", "dali", "fused_", "h5", "huggingface", "release_1_0_2")
"""Modules with names that only an optional package, or the other host, can run, or a GPU."""


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


@pytest.mark.parametrize("package", WHOLE)
def test_names_of_the_modules_have_an_example(package: str) -> None:
    """But for records and interfaces, which are in the examples of what returns or takes them."""
    lacking = []
    for module in _modules():
        if not module.__name__.startswith(package) or any(n in module.__name__ for n in NEEDS_MORE):
            continue
        for name, value in vars(module).items():
            record = hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__")
            own = getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
            if own and callable(value) and not record and not hasattr(value, "model_fields"):
                interface = getattr(value, "_is_protocol", False)
                if not interface and ">>>" not in (inspect.getdoc(value) or ""):
                    lacking.append(f"{module.__name__}.{name}")
    assert not lacking
