"""Runs as teachers: backbone, projector and prototypes of every kind of method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from solo_ext import host
from solo_ext.core.errors import UserError
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS
from solo_ext.lab.training.prepare import prepare
from solo_ext.plugin import register
from solo_ext.pretrained.run_teacher import _GELU, _RELU
from solo_ext.pretrained.runs import load_pretrained
from solo_ext.pretrained.teachers import LoadedTeacher, TeacherSource, load_teacher

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def saved(make_config: MakeConfig, tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """``saved(method, **changes)``: an untrained method and the run directory that it is in."""

    def save(method: str, **changes: Any) -> tuple[Any, Path]:
        prepared = prepare(make_config(method, **changes))
        torch.manual_seed(0)
        module = prepared.method(prepared.cfg).eval()
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
        state = {"state_dict": module.state_dict(), "epoch": 0}
        torch.save(state, tmp_path / "tiny-ep=0.ckpt")
        (tmp_path / "args.json").write_text(json.dumps(prepared.given))
        return module, tmp_path

    return save


def load(path: Path, **settings: Any) -> LoadedTeacher:
    return load_teacher(TeacherSource(layout="run", path=str(path), **settings))


def edit(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    args = json.loads((run / "args.json").read_text())
    change(args)
    (run / "args.json").write_text(json.dumps(args))


def test_a_run_of_swav(teacher: Path) -> None:
    before = torch.random.get_rng_state()
    found = load(teacher)
    assert torch.equal(torch.random.get_rng_state(), before)
    pretrained = load_pretrained(teacher)
    state = torch.load(pretrained.checkpoint, weights_only=True)["state_dict"]
    assert found.digest == pretrained.digest
    assert (found.features_dim, found.embed_dim, found.input_size) == (16, 8, 16)
    assert found.mean == (0.485, 0.456, 0.406)
    assert found.prototypes is not None
    rows = state.get(
        "prototypes.weight_v", state.get("prototypes.parametrizations.weight.original1")
    )
    torch.testing.assert_close(found.prototypes, F.normalize(rows, dim=1))
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        feats = pretrained.backbone.eval()(x)
        assert torch.equal(found.backbone(x), feats)
        hidden = F.linear(feats, state["projector.0.weight"], state["projector.0.bias"])
        norm = [
            state[f"projector.1.{k}"] for k in ("running_mean", "running_var", "weight", "bias")
        ]
        hidden = F.relu(F.batch_norm(hidden, *norm))
        z = F.linear(hidden, state["projector.3.weight"], state["projector.3.bias"])
        assert found.head is not None
        torch.testing.assert_close(found.head(feats), z)


@pytest.mark.parametrize(
    "method", ["simclr", "simsiam", "mocov3", "barlow_twins", "vibcreg", "nnclr", "debiased"]
)
def test_projectors(method: str, saved: Callable[..., Any], loaded: host.Host) -> None:
    if method not in loaded.methods and method in BUILTIN_KWARGS:
        pytest.skip(f"solo-learn {loaded.info.generation} has no {method}")
    kwargs = {"iternorm": False} if method == "vibcreg" else {}
    module, run = saved(method, method_kwargs=kwargs)
    found = load(run)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        feats = module.backbone(x)
        expected = module.projector(feats)
        assert found.head is not None
        torch.testing.assert_close(found.head(found.backbone(x)), expected)
    assert found.prototypes is None
    assert found.description.endswith("no prototypes")
    assert found.embed_dim == expected.shape[1]


@pytest.mark.parametrize("networks", ["online", "momentum"])
def test_online_and_momentum_networks(networks: Any, saved: Callable[..., Any]) -> None:
    module, run = saved("dino")
    with torch.no_grad():
        for weights in (*module.momentum_backbone.parameters(), *module.momentum_head.parameters()):
            weights.normal_()
    torch.save({"state_dict": module.state_dict(), "epoch": 0}, run / "tiny-ep=0.ckpt")
    found = load(run, networks=networks)
    own = networks == "momentum"
    body = module.momentum_backbone if own else module.backbone
    head = module.momentum_head if own else module.head
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        feats = body.eval()(x)
        assert torch.equal(found.backbone(x), feats)
        assert found.head is not None
        torch.testing.assert_close(found.head(feats), head.mlp(feats))
    rows = module.state_dict()
    start = f"{'momentum_' if own else ''}head.last_layer."
    (direction,) = (v for k, v in rows.items() if k.startswith(start) and v.shape[1] > 1)
    assert found.prototypes is not None
    torch.testing.assert_close(found.prototypes, F.normalize(direction, dim=1))
    assert ("momentum networks of" in found.description) == own


def test_a_run_without_momentum_networks(saved: Callable[..., Any]) -> None:
    _, run = saved("simclr")
    with pytest.raises(UserError, match="no key starts with"):
        load(run, networks="momentum")


def test_what_is_not_taken_is_said(saved: Callable[..., Any]) -> None:
    _, run = saved("deepclusterv2")
    found = load(run)
    assert found.head is not None
    assert found.prototypes is None
    assert "its prototypes are not one set" in found.description
    edit(run, lambda a: a.update(method="somebodys"))
    found = load(run)
    assert (found.head, found.head_spec, found.embed_dim) == (None, None, found.features_dim)
    assert "the activation of somebodys's projector is not known" in found.description


def test_a_projector_that_is_no_such_head(saved: Callable[..., Any]) -> None:
    module, run = saved("simclr")
    state = {**module.state_dict(), "projector.9.scale": torch.ones(1)}
    torch.save({"state_dict": state, "epoch": 0}, run / "tiny-ep=0.ckpt")
    found = load(run)
    assert found.head is None
    assert "cannot be rebuilt (unexpected: projector.9.scale)" in found.description
    bare = {k: v for k, v in state.items() if not k.startswith("projector.")}
    torch.save({"state_dict": bare, "epoch": 0}, run / "tiny-ep=0.ckpt")
    assert "the run has no projector" in load(run).description


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"head": "mlp", "teacher": {"layout": "dino"}}, "relu"),
        ({"head": "teacher", "teacher": {"layout": "dino"}}, "gelu"),
        ({"head": "teacher", "teacher": {"layout": "swav"}}, "relu"),
        ({"head": "teacher", "teacher": {"layout": "run", "path": "nowhere"}}, None),
        ({"head": "teacher", "teacher": {"layout": "run", "path": "own"}}, "relu"),
    ],
)
def test_head_of_a_student(
    settings: dict[str, Any], activation: str | None, saved: Callable[..., Any], teacher: Path
) -> None:
    _, run = saved("simclr")
    if settings["teacher"].get("path") == "own":
        settings = {**settings, "teacher": {"layout": "run", "path": str(teacher)}}
    edit(run, lambda a: a.update(method="seed", method_kwargs=settings))
    found = load(run)
    assert (found.head_spec and found.head_spec.activation) == activation


def test_normalisation_and_size_of_the_run(saved: Callable[..., Any]) -> None:
    crops = {"crop_size": 24, "num_crops": 2, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    _, run = saved("simclr", augmentations=[crops])
    found = load(run)
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert found.input_size == 24
    edit(run, lambda a: a["data"].update(dataset="cifar10"))
    assert load(run).std == (0.2470, 0.2435, 0.2616)


def test_names_of_the_release(saved: Callable[..., Any]) -> None:
    _, run = saved("byol")
    expected = {n: load(run, networks=n) for n in ("online", "momentum")}
    (file,) = run.glob("*.ckpt")
    held = torch.load(file, weights_only=True)["state_dict"]
    state = {k.replace("backbone.", "encoder."): v for k, v in held.items()}
    torch.save({"state_dict": state, "epoch": 0}, file)
    args = {
        "encoder": "timm/resnet10t",
        "backbone_args": {"cifar": False, "channels": [8, 8, 8, 8], "small_stem": False},
        "method": "byol",
        "dataset": "custom",
        "batch_size": 24,
        "transform_kwargs": {"crop_size": 16},
    }
    (run / "args.json").write_text(json.dumps(args))
    x = torch.randn(2, 3, 16, 16)
    for networks, before in expected.items():
        found = load(run, networks=networks)
        assert torch.equal(found.backbone(x), before.backbone(x))
        assert found.head_spec == before.head_spec
        assert found.head_spec is not None


def test_activations_are_known_for_every_method(loaded: host.Host) -> None:
    """A method that is not listed loses its head as a teacher."""
    register()
    without_projector = {"base", "linear", "mae"}
    students = {"seed", "protoseed"}
    own = {
        n
        for n, kind in loaded.methods.items()
        if kind.__module__.startswith(("solo.", "solo_ext."))
    }
    assert own - without_projector - students <= {*_GELU, *_RELU}
