"""Tests of the old module names under which solo-learn 1.0.2 is imported.

Each scenario needs a process that has not loaded solo-learn yet. Importing the stack takes ten
seconds, so that one process imports it, forks for every scenario, and prints what each saw::

    python tests/host/test_aliases.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
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
Report = dict[str, Any]
SCENARIOS: dict[str, Callable[[], Report]] = {}


def scenario(function: Callable[[], Report]) -> Callable[[], Report]:
    SCENARIOS[function.__name__] = function
    return function


def old_modules() -> dict[str, ModuleType]:
    return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in OLD}


def load() -> Any:
    from solo_ext import host

    return host.load()


def finders() -> list[str]:
    # Libraries that are imported on the way, such as six, add their own.
    kinds = [type(f) if not isinstance(f, type) else f for f in sys.meta_path]
    return [k.__name__ for k in kinds if "six" not in k.__name__.lower()]


@scenario
def plain() -> Report:
    """solo-learn is loaded in a process that has none of the old modules."""
    for name in old_modules():
        del sys.modules[name]
    before = finders()
    loaded = load()
    left = sorted(old_modules())
    gone = importlib.util.find_spec("pl_bolts") is None
    import lightning.pytorch

    linear = loaded.methods["linear"]
    return {
        "left": left,
        "gone": gone,
        "finders": finders() == before,
        "again": load() is loaded,
        "base": issubclass(linear, lightning.pytorch.LightningModule),
        "same_name": sys.modules["solo.methods.linear"].pl is lightning.pytorch,
        "methods": sorted(loaded.methods),
    }


@scenario
def real_one_afterwards() -> Report:
    """The real pytorch_lightning is imported after solo-learn was loaded."""
    load()
    import lightning.pytorch
    import pytorch_lightning

    return {
        "own": pytorch_lightning.LightningModule is not lightning.pytorch.LightningModule,
        "file": "pytorch_lightning" in (pytorch_lightning.__file__ or ""),
        "spec": pytorch_lightning.__spec__.name,
    }


@scenario
def real_one_before() -> Report:
    """The real pytorch_lightning is imported before, and somebody holds on to it."""
    import lightning.pytorch
    import pytorch_lightning

    before = old_modules()
    specs = {name: module.__spec__ for name, module in before.items()}
    loaded = load()
    after = old_modules()
    import pytorch_lightning.strategies

    return {
        "names": set(before) == set(after),
        "untouched": all(after[name] is module for name, module in before.items()),
        "held": sys.modules["pytorch_lightning"] is before["pytorch_lightning"],
        "own": pytorch_lightning.LightningModule is not lightning.pytorch.LightningModule,
        "specs": all(after[name].__spec__ is spec for name, spec in specs.items()),
        "submodule": pytorch_lightning.strategies.__name__,
        "solo": issubclass(loaded.methods["simclr"], lightning.pytorch.LightningModule)
        and not issubclass(loaded.methods["simclr"], pytorch_lightning.LightningModule),
    }


@scenario
def specs() -> Report:
    """Importing a module under an alias gives it the alias's spec for a while."""
    import lightning.pytorch

    before = {n: m.__spec__ for n, m in sys.modules.items() if n.startswith("lightning")}
    odd = {n for n, spec in before.items() if spec is None or spec.name != n}
    load()
    from lightning.pytorch.utilities import rank_zero

    callback = lightning.pytorch.Callback
    held = pickle.loads(pickle.dumps((callback, rank_zero.rank_zero_only)))
    return {
        "name": lightning.pytorch.__spec__.name,
        "same": all(sys.modules[n].__spec__ is spec for n, spec in before.items()),
        # Lightning itself plants a few modules without a spec.
        "wrong": sorted(
            n for n, m in sys.modules.items() if _spec_of_another(n, m) and n not in odd
        ),
        "pickle": held == (callback, rank_zero.rank_zero_only),
        "found": importlib.util.find_spec("lightning.pytorch.callbacks").name,
        "reload": importlib.reload(rank_zero) is rank_zero,
        "reload_package": importlib.reload(lightning.pytorch) is lightning.pytorch,
        "still": lightning.pytorch.LightningModule.__module__,
    }


def _spec_of_another(name: str, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return name.startswith("lightning") and (spec is None or spec.name != name)


@scenario
def failed_import_before() -> Report:
    """A plain ``import solo`` fails on pl_bolts and leaves a half-made package."""
    error = ""
    try:
        import solo
    except ModuleNotFoundError as caught:
        error = str(caught)
    half = {n: m for n, m in sys.modules.items() if n.startswith("solo.")}
    real = sys.modules["pytorch_lightning"]
    loaded = load()
    import solo

    return {
        "error": error,
        "half": sorted(half),
        "fresh": all(sys.modules.get(name) is not module for name, module in half.items()),
        "whole": solo is loaded.solo and solo.methods.METHODS is loaded.methods,
        "left": "pl_bolts" in sys.modules,
        "held": sys.modules["pytorch_lightning"] is real,
    }


@scenario
def everything_before() -> Report:
    """pytorch_lightning, then a failed ``import solo``, then solo-learn."""
    import pytorch_lightning

    with contextlib.suppress(ModuleNotFoundError):
        import solo  # noqa: F401
    loaded = load()
    return {
        "held": sys.modules["pytorch_lightning"] is pytorch_lightning,
        "methods": sorted(loaded.methods),
    }


def run_all() -> dict[str, Report]:
    """What every scenario saw, each in a fork of this process."""
    for name in ("torchvision", "timm", "lightning.pytorch", "solo_ext.host"):
        importlib.import_module(name)
    reports = {}
    for name, function in SCENARIOS.items():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                report = function()
            except BaseException:
                report = {"failed": traceback.format_exc()}
            with os.fdopen(write, "w") as pipe:
                json.dump(report, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            reports[name] = json.load(pipe)
        os.waitpid(child, 0)
    return reports


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Report] = json.loads(done.stdout)
    return found


@pytest.fixture
def report(reports: dict[str, Report], request: pytest.FixtureRequest) -> Report:
    """The report of the scenario that the test is named after."""
    found = reports[request.node.name.removeprefix("test_")]
    assert "failed" not in found, found["failed"]
    return found


def test_plain(report: Report) -> None:
    assert report["left"] == []
    assert report["gone"], "pl_bolts can be found after loading"
    assert report["finders"]
    assert report["again"]
    assert report["base"]
    assert report["same_name"]
    assert {"simclr", "dino", "linear"} <= set(report["methods"])


def test_real_one_afterwards(report: Report) -> None:
    assert report == {"own": True, "file": True, "spec": "pytorch_lightning"}


def test_real_one_before(report: Report) -> None:
    assert report["untouched"]
    assert report["held"]
    assert report["names"]
    assert report["own"]
    assert report["specs"]
    assert report["submodule"] == "pytorch_lightning.strategies"
    assert report["solo"]


def test_specs(report: Report) -> None:
    assert report["name"] == "lightning.pytorch"
    assert report["same"]
    assert report["wrong"] == []
    assert report["pickle"]
    assert report["found"] == "lightning.pytorch.callbacks"
    assert report["reload"]
    assert report["reload_package"]
    assert report["still"].startswith("lightning.pytorch")


def test_failed_import_before(report: Report) -> None:
    assert "pl_bolts" in report["error"], "the failure that this is about did not happen"
    assert report["half"], "the failed import left nothing behind"
    assert report["fresh"], "what it left had the old module names"
    assert report["whole"]
    assert not report["left"]
    assert report["held"], "what solo-learn imported before it failed is another module now"


def test_everything_before(report: Report) -> None:
    assert report["held"]
    assert "simclr" in report["methods"]


def test_every_scenario_is_judged() -> None:
    assert {f"test_{name}" for name in SCENARIOS} <= set(globals())


def test_real_modules_come_back_when_the_import_fails() -> None:
    from solo_ext.host.release_1_0_2.aliases import legacy_imports

    held = ModuleType("pytorch_lightning")
    path, others = list(sys.meta_path), old_modules()

    def fails() -> None:
        with legacy_imports():
            assert sys.modules.get("pytorch_lightning") is not held
            assert importlib.import_module("pl_bolts.optimizers").Anything is object
            raise RuntimeError("broken")

    try:
        sys.modules["pytorch_lightning"] = held
        with pytest.raises(RuntimeError, match="broken"):
            fails()
        assert sys.modules["pytorch_lightning"] is held
        assert "pl_bolts" not in sys.modules
        assert sys.meta_path == path
    finally:
        for name in old_modules():
            del sys.modules[name]
        sys.modules.update(others)


def test_below_the_old_name_lies_no_second_copy() -> None:
    """A submodule imported under the old name is the new one, class for class."""
    import lightning.pytorch.callbacks

    from solo_ext.host.release_1_0_2.aliases import legacy_imports

    with legacy_imports():
        callbacks = importlib.import_module("pytorch_lightning.callbacks")
        deep = importlib.import_module("pytorch_lightning.utilities.rank_zero")
    assert callbacks is lightning.pytorch.callbacks
    assert deep is lightning.pytorch.utilities.rank_zero
    assert callbacks.__spec__.name == "lightning.pytorch.callbacks"
    with legacy_imports(), pytest.raises(AttributeError):
        _ = importlib.import_module("pl_bolts").__wrapped__


if __name__ == "__main__":
    print(json.dumps(run_all()))
