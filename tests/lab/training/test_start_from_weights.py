"""Runs with ``backbone.weights``: how they begin, what they record, and how they resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from solo_ext.core.errors import UserError
from solo_ext.host import Host
from solo_ext.lab.experiments.work import _without_paths
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import _base_run_dir
from solo_ext.pretrained.runs import load_pretrained
from tests.conftest import DISTILLATION, KWARGS

MakeConfig = Callable[..., dict[str, Any]]
METHODS = ("simclr", "pcl")
"""With and without a momentum backbone, of solo-learn and of this package."""


@pytest.fixture(scope="module")
def source(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights others start from."""
    place = tmp_path_factory.mktemp("source") / "run"
    return pretrain(
        prepare(make_config("simclr", seed=8)), run_dir=place, show_progress=False
    ).run_dir


def trained(config: dict[str, Any], place: Path, *callbacks: Callback) -> Path:
    done = pretrain(prepare(config), run_dir=place, callbacks=callbacks, show_progress=False)
    return done.run_dir


def refused(act: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        act(*args, **kwargs)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


class Begun(UserError):
    """All of the run that is looked at."""


class AtStart(Callback):
    """Copies weights and random state before the first step, and ends the run."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = {k: v.clone() for k, v in pl_module.state_dict().items()}
        self.state["random"] = torch.random.get_rng_state()
        raise Begun("the weights are copied")


def at_start(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """The weights and the random state with which a run begins."""
    began = AtStart()
    with pytest.raises(Begun):
        trained({**config, "checkpoint": {"enabled": False}}, place, began)
    return began.state


def below(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def check_start(method: str, make: MakeConfig, source: Path, place: Path) -> None:
    """The backbones have the source's weights, all else is as without them, also what is drawn."""
    plain = at_start(make(method), place / "plain")
    began = at_start(make(method, backbone={"weights": str(source)}), place / "began")
    wanted = load_pretrained(source).backbone.state_dict()
    assert same(below(began, "backbone."), wanted)
    momentum = below(began, "momentum_backbone.")
    assert bool(momentum) == any(k.startswith("momentum_backbone.") for k in plain)
    assert not momentum or same(momentum, wanted)
    others = [k for k in plain if not k.startswith(("backbone.", "momentum_backbone."))]
    assert all(torch.equal(plain[k], began[k]) for k in others)
    assert not same(below(plain, "backbone."), wanted)


@pytest.mark.parametrize("method", METHODS)
def test_how_methods_begin(
    method: str, make_config: MakeConfig, source: Path, tmp_path: Path
) -> None:
    check_start(method, make_config, source, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(KWARGS.keys() - {*METHODS, *DISTILLATION}))
def test_how_every_method_begins(
    method: str, make_config: MakeConfig, source: Path, loaded: Host, tmp_path: Path
) -> None:
    if method not in loaded.methods:
        pytest.skip("the release does not have it")
    check_start(method, make_config, source, tmp_path)


@pytest.mark.parametrize("method", DISTILLATION)
def test_students(method: str, make_distilled: MakeConfig, source: Path, tmp_path: Path) -> None:
    config = make_distilled(
        method, method_kwargs={"head": "mlp"}, backbone={"weights": str(source)}
    )
    began = at_start(config, tmp_path / "run")
    wanted = load_pretrained(source).backbone.state_dict()
    assert same(below(began, "backbone."), wanted)


def test_records(
    make_config: MakeConfig,
    source: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        run = trained(make_config("simclr", backbone={"weights": str(source)}), tmp_path / "run")
    digest = load_pretrained(source).digest
    record = json.loads((run / "weights.json").read_text())
    assert (record["source"], record["digest"]) == (str(source), digest)
    assert yaml.safe_load((run / "config.yaml").read_text())["backbone"]["weights"] == str(source)
    (line,) = [r.message for r in caplog.records if r.message.startswith("backbone.weights: ")]
    count = len(load_pretrained(source).backbone.state_dict())
    assert f"all {count} tensors from run " in line
    assert "left out: classifier.weight, " in line
    assert not (trained(make_config("simclr"), tmp_path / "plain") / "weights.json").exists()


def test_nothing_is_left_where_weights_do_not_fit(
    make_config: MakeConfig, source: Path, tmp_path: Path
) -> None:
    kwargs = {"channels": [8, 8, 8, 16], "small_stem": False}
    config = make_config("simclr", backbone={"weights": str(source), "kwargs": kwargs})
    line = refused(trained, config, tmp_path / "run")
    assert line.startswith(f"backbone.weights={str(source)!r}: run ")
    assert "backbone.layer4.0.conv1.weight is (8, 8, 3, 3) in the file and (16, 8, 3, 3) in" in line
    assert not (tmp_path / "run").exists()
    for name in ("pretrained", "checkpoint_path"):
        config = make_config("simclr", backbone={"weights": "x", "kwargs": {name: "y"}})
        assert "backbone.weights names other weights; give one" in refused(prepare, config)


@pytest.fixture
def begun(make_config: MakeConfig, source: Path, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """Its config, and a run of two epochs that stopped after the first; of its own copy."""
    copied = Path(shutil.copytree(source, tmp_path / "weights"))
    config = make_config("byol", backbone={"weights": str(copied)}, max_epochs=2)

    class AfterAnEpoch(Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                raise KeyError("stopped by the test")

    with pytest.raises(KeyError):
        trained(config, tmp_path / "run", AfterAnEpoch())
    return config, tmp_path / "run"


def test_resumed_without_the_file(
    begun: tuple[dict[str, Any], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, run = begun
    whole = trained(config, tmp_path / "whole")
    digest = json.loads((run / "weights.json").read_text())["digest"]
    shutil.rmtree(tmp_path / "weights")
    caplog.clear()
    with caplog.at_level("INFO"):
        done = resume(run)
    assert not [r for r in caplog.records if r.message.startswith("backbone.weights")]
    ends = [load_pretrained(folder).weights for folder in (whole, run)]
    assert done.epochs == 2
    assert same(*ends)
    assert json.loads((run / "weights.json").read_text())["digest"] == digest
    state = torch.load(done.checkpoint, weights_only=True)  # type: ignore[arg-type]
    assert state["solo_ext"]["identity"]["weights"]["digest"] == digest


def test_resumed_with_the_file_elsewhere(
    begun: tuple[dict[str, Any], Path], source: Path, tmp_path: Path
) -> None:
    _, run = begun
    shutil.rmtree(tmp_path / "weights")
    assert resume(run, [f"backbone.weights={source}"]).epochs == 2


def test_other_weights_are_refused(
    begun: tuple[dict[str, Any], Path], source: Path, tmp_path: Path
) -> None:
    config, run = begun
    other = Path(shutil.copytree(tmp_path / "weights", tmp_path / "other"))
    (file,) = other.glob("*.ckpt")
    held = torch.load(file, weights_only=True)
    held["state_dict"]["backbone.bn1.weight"] += 1
    torch.save(held, file)
    says = "is of another run: backbone.weights: "
    for changed in (str(other), "timm/resnet10t"):
        line = refused(resume, run, [f"backbone.weights={changed}"])
        assert says in line
        assert changed in line
    assert f'{says}"{tmp_path / "weights"}" -> null' in refused(
        resume, run, ["backbone.weights=null"]
    )
    # The same name for another file.
    shutil.copy(file, next((tmp_path / "weights").glob("*.ckpt")))
    assert says in refused(trained, config, run)
    # A run that began with random weights.
    plain = {**config, "backbone": {k: v for k, v in config["backbone"].items() if k != "weights"}}
    begun_plain = trained({**plain, "max_epochs": 1}, tmp_path / "plain")
    line = refused(trained, {**plain, "backbone": config["backbone"]}, begun_plain)
    assert f'backbone.weights: null -> "{tmp_path / "weights"}"' in line
    assert resume(run, [f"backbone.weights={other}"], force=True).epochs == 2


def test_runs_without_weights_are_as_before(make_config: MakeConfig) -> None:
    """Digests of runs, features and records cover the section: it has no new key."""
    run = prepare(make_config("simclr", backbone={"weights": None})).run
    assert "weights" not in run.model_dump()["backbone"]
    assert "weights" not in json.loads(run.model_dump_json())["backbone"]
    assert _base_run_dir(run) == _base_run_dir(prepare(make_config("simclr")).run)
    other = prepare(make_config("simclr", backbone={"weights": "elsewhere"})).run
    assert _base_run_dir(run) != _base_run_dir(other)


def test_published_records_name_a_digest(make_config: MakeConfig, source: Path) -> None:
    run = prepare(make_config("simclr", backbone={"weights": str(source)})).run

    class Planned:
        teacher = None

    config = _without_paths(run.model_dump(), Planned())  # type: ignore[arg-type]
    assert config["backbone"]["weights"] == load_pretrained(source).digest
