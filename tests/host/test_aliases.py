"""Tests of the old module names under which solo-learn 1.0.2 is imported.

Each scenario needs a process that has not loaded solo-learn yet. Importing the stack takes ten
seconds, so that one process imports it, forks for every scenario, and prints how each failed::

    python tests/host/test_aliases.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from solo_ext.host import detect

if detect().generation != "1.0.2":
    pytest.skip("main imports modules by today's names", allow_module_level=True)
OLD = ("pl_bolts", "distutils", "pytorch_lightning")
SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def old_modules() -> dict[str, ModuleType]:
    return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in OLD}


def load() -> Any:
    from solo_ext import host

    return host.load()


@scenario
def plain() -> None:
    """solo-learn is loaded in a process that has none of the old modules."""
    for name in old_modules():
        del sys.modules[name]
    loaded = load()
    assert not old_modules()
    assert importlib.util.find_spec("pl_bolts") is None
    import lightning.pytorch

    assert load() is loaded
    assert issubclass(loaded.methods["linear"], lightning.pytorch.LightningModule)
    assert sys.modules["solo.methods.linear"].pl is lightning.pytorch
    # The real pytorch_lightning, imported after solo-learn was loaded.
    import pytorch_lightning

    assert pytorch_lightning.LightningModule is not lightning.pytorch.LightningModule
    assert pytorch_lightning.__spec__.name == "pytorch_lightning"


@scenario
def real_one_before() -> None:
    """The real pytorch_lightning is imported before, and somebody holds on to it."""
    import lightning.pytorch
    import pytorch_lightning

    before = old_modules()
    loaded = load()
    after = old_modules()
    import pytorch_lightning.strategies

    assert set(before) == set(after)
    assert all(after[name] is module for name, module in before.items())
    assert pytorch_lightning.LightningModule is not lightning.pytorch.LightningModule
    assert pytorch_lightning.strategies.__name__ == "pytorch_lightning.strategies"
    assert issubclass(loaded.methods["simclr"], lightning.pytorch.LightningModule)


@scenario
def failed_import_before() -> None:
    """A plain ``import solo`` fails on pl_bolts and leaves a half-made package."""
    with pytest.raises(ModuleNotFoundError, match="pl_bolts"):
        import solo
    half = {n: m for n, m in sys.modules.items() if n.startswith("solo.")}
    assert half
    real = sys.modules["pytorch_lightning"]
    loaded = load()
    import solo

    assert all(sys.modules.get(name) is not module for name, module in half.items())
    assert solo is loaded.solo
    assert solo.methods.METHODS is loaded.methods
    assert "pl_bolts" not in sys.modules
    assert sys.modules["pytorch_lightning"] is real


def run_all() -> dict[str, str]:
    """The traceback of every scenario, each in a fork of this process; empty where it passed."""
    for name in ("torchvision", "timm", "lightning.pytorch", "solo_ext.host"):
        importlib.import_module(name)
    failures = {}
    for name, function in SCENARIOS.items():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            failure = ""
            try:
                function()
            except BaseException:
                failure = traceback.format_exc()
            with os.fdopen(write, "w") as pipe:
                pipe.write(failure)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            failures[name] = pipe.read()
        os.waitpid(child, 0)
    return failures


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, failures: dict[str, str]) -> None:
    assert not failures[name]


def test_real_modules_come_back_when_the_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from solo_ext.host.release_1_0_2 import legacy_imports

    held = ModuleType("pytorch_lightning")

    def fails() -> None:
        with legacy_imports():
            assert sys.modules.get("pytorch_lightning") is not held
            assert importlib.import_module("pl_bolts.optimizers").Anything is object
            raise RuntimeError("broken")

    monkeypatch.setitem(sys.modules, "pytorch_lightning", held)
    with pytest.raises(RuntimeError, match="broken"):
        fails()
    assert sys.modules["pytorch_lightning"] is held
    assert "pl_bolts" not in sys.modules


if __name__ == "__main__":
    print(json.dumps(run_all()))
