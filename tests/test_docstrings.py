"""Every public function and class of the package has an example in its docstring, which runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest

import solo_ext

# The program `python -m solo_ext` is no part to import.
PARTS: tuple[str, ...] = tuple(
    f"solo_ext.{m.name}" for m in pkgutil.iter_modules(solo_ext.__path__) if m.name != "__main__"
)
NEEDS_MORE = ("backends", "dali", "fused_", "h5", "huggingface", "launchers")
"""Parts of the names of modules that only an optional package, a GPU or a cluster can run."""
WITHOUT: dict[str, str] = {
    "solo_ext.clustering.relocation.Halves": "in the example of halves, which returns it",
    "solo_ext.data.convert.Converted": "in the example of convert, which returns it",
    "solo_ext.data.streaming.MDS": "an entry of an index, which open_streaming reads",
    "solo_ext.data.webdataset.Tar": "an entry of an index, which open_webdataset makes",
    "solo_ext.host.release_1_0_2.load": "replaces modules of solo-learn 1.0.2, and has done so",
    "solo_ext.lab.experiments.work.main": "ends with its standard input",
    "solo_ext.lab.experiments.work.work": "trains",
    "solo_ext.lab.experiments.work.work_in_process": "ends its process",
    "solo_ext.lab.training.pretrain.pretrain": "trains",
}
"""Names without an example, and why."""


def _modules(part: str) -> Iterator[ModuleType]:
    top = importlib.import_module(part)
    yield top
    for info in pkgutil.walk_packages(getattr(top, "__path__", ()), f"{part}."):
        try:
            yield importlib.import_module(info.name)
        except ImportError:
            # DALI and the other host's modules.
            continue


def _in_a_training_run(value: Any) -> bool:
    """Callbacks and data modules of Lightning, and functions that take a Trainer."""
    if inspect.isclass(value):
        return issubclass(value, pl.Callback | pl.LightningDataModule)
    return "trainer" in inspect.signature(value).parameters


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions and classes that a module defines, or names in ``__all__``."""
    shown = getattr(module, "__all__", ())
    for name in {*vars(module), *shown}:
        value = getattr(module, name)
        home = getattr(value, "__module__", None) or ""
        own = home == module.__name__ or (name in shown and home.startswith("solo_ext"))
        if own and callable(value) and not name.startswith("_"):
            yield name, value


@pytest.mark.parametrize("part", PARTS)
def test_examples_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    failed = {
        module.__name__: doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed
        for module in _modules(part)
    }
    assert not [name for name, count in failed.items() if count]


@pytest.mark.parametrize("part", PARTS)
def test_public_names_have_an_example(part: str) -> None:
    """But for interfaces, which are shown where something takes them."""
    lacking = [
        f"{module.__name__}.{name}"
        for module in _modules(part)
        if not any(word in module.__name__ for word in NEEDS_MORE)
        for name, value in _public(module)
        if ">>>" not in (value.__doc__ or "")
        and not getattr(value, "_is_protocol", False)
        and not _in_a_training_run(value)
    ]
    assert sorted(set(lacking) - WITHOUT.keys()) == []
