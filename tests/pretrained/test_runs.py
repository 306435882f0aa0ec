"""Runs: their backbones, and the networks of every kind of method as teachers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
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
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.methods.distillation import TeacherKwargs
from solo_ext.plugin import register
from solo_ext.pretrained.loaded import LoadedTeacher
from solo_ext.pretrained.runs import GELU, RELU, load_pretrained
from solo_ext.pretrained.teachers import load_teacher
from tests.pretrained.conftest import refusal

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def finished(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs that keeps both checkpoints."""
    config = make_config("simclr", max_epochs=2, checkpoint={"keep_prev": True})
    place = tmp_path_factory.mktemp("runs") / "run"
    return pretrain(prepare(config), run_dir=place, show_progress=False).run_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to spoil; times of the files kept."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def change(run: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits args.json in place."""
    file = run / "args.json"
    args = json.loads(file.read_text())
    edit(args)
    file.write_text(json.dumps(args))


def test_weights_are_those_of_the_checkpoint(finished: Path) -> None:
    found = load_pretrained(finished)
    state = torch.load(found.checkpoint, weights_only=True)["state_dict"]
    weights = {k.removeprefix("backbone."): v for k, v in state.items() if "backbone." in k}
    own = found.backbone.state_dict()
    assert own.keys() == weights.keys()
    assert all(torch.equal(own[k], weights[k]) for k in weights)
    assert found.features_dim == found.backbone(torch.zeros(2, 3, 16, 16)).shape[1]
    assert found.cfg.method == "simclr"
    assert found.digest == hashlib.sha256(found.checkpoint.read_bytes()).hexdigest()[:16]


def test_last_checkpoint_or_the_one_that_is_named(run: Path) -> None:
    first, second = sorted(run.glob("*.ckpt"))
    assert load_pretrained(run).checkpoint == second
    assert load_pretrained(run).epoch == 2
    assert load_pretrained(first).epoch == 1
    # Copying a folder may give its files any times.
    os.utime(first, (2e9, 2e9))
    assert load_pretrained(run).checkpoint == second


def test_last_checkpoint_is_told_by_numbers(run: Path) -> None:
    (file, other) = run.glob("*.ckpt")
    other.unlink()
    steps = ["a-ep=10-step=90.ckpt", "a-ep=10-step=700.ckpt"]
    names = ["z.ckpt", "a-ep=9.ckpt", *steps, "a-ep=10.ckpt"]
    for name in names:
        shutil.copy(file, run / name)
    file.unlink()
    for name in reversed(names):
        assert load_pretrained(run).checkpoint.name == name
        (run / name).unlink()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda a: a.pop("backbone"), "names no backbone"),
        (lambda a: a["backbone"].pop("name"), "backbone.name=null: this key is required"),
        (lambda a: a["backbone"].update(name="timm/resnet81"), "did you mean 'timm/resnet18'?"),
        (lambda a: a["backbone"]["kwargs"].update(width=8), "unexpected keyword argument 'width'"),
        (lambda a: a["backbone"]["kwargs"].update(channels=[16] * 4), "of another shape: layer1"),
        (lambda a: a.pop("data"), "data=null: this key is required"),
        (lambda a: a.update(augmentations=[]), "augmentations=[]: not a valid value"),
    ],
)
def test_args_that_do_not_do(edit: Callable[[dict[str, Any]], Any], says: str, run: Path) -> None:
    change(run, edit)
    assert says in refusal(load_pretrained, run)


def test_folders_without_a_run(run: Path, tmp_path: Path) -> None:
    assert "no such run directory" in refusal(load_pretrained, tmp_path / "nothing")
    for text in ("[1]", '{"encoder": 3}', "{", "[" * 5000):
        (run / "args.json").write_text(text)
        assert str(run / "args.json") in refusal(load_pretrained, run)
    (run / "args.json").unlink()
    assert "no args.json beside" in refusal(load_pretrained, run)
    for file in run.glob("*.ckpt"):
        file.unlink()
    assert "no .ckpt file in it" in refusal(load_pretrained, run)


def test_files_that_are_no_checkpoint(run: Path) -> None:
    (*_, file) = sorted(run.glob("*.ckpt"))
    for content, says in (
        ([1, 2], "holds a list"),
        ({"state_dict": None}, "no Lightning checkpoint"),
        ({"state_dict": {}, "epoch": "last"}, "no Lightning checkpoint, or a damaged one"),
        ({"state_dict": {"head.weight": torch.zeros(1)}}, "holds no backbone"),
    ):
        torch.save(content, file)
        assert says in refusal(load_pretrained, run)


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
        (tmp_path / "args.json").write_text(prepared.run.model_dump_json())
        return module, tmp_path

    return save


def load(path: Path, **settings: Any) -> LoadedTeacher:
    return load_teacher(TeacherKwargs(layout="run", path=str(path), **settings))


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


@pytest.mark.parametrize("method", ["simclr", "simsiam", "mocov3", "vibcreg", "debiased"])
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


def test_what_is_not_taken_is_said(saved: Callable[..., Any]) -> None:
    _, run = saved("deepclusterv2")
    found = load(run)
    assert found.head is not None
    assert found.prototypes is None
    assert "its prototypes are not one set" in found.description
    change(run, lambda a: a.update(method="somebodys"))
    found = load(run)
    assert (found.head, found.embed_dim) == (None, found.features_dim)
    assert "the activation of somebodys's projector is not known" in found.description


def test_a_projector_that_is_no_such_head(saved: Callable[..., Any]) -> None:
    module, run = saved("simclr")
    state = {**module.state_dict(), "projector.9.scale": torch.ones(1)}
    torch.save({"state_dict": state, "epoch": 0}, run / "tiny-ep=0.ckpt")
    found = load(run)
    assert found.head is None
    assert "cannot be rebuilt (unexpected: projector.9.scale)" in found.description
    with pytest.raises(UserError, match="no key starts with"):
        load(run, networks="momentum")
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
        ({"head": "teacher", "teacher": {"layout": "run", "path": "its teacher"}}, "relu"),
        ({"head": "teacher", "teacher": {"layout": "run", "path": "itself"}}, None),
    ],
)
def test_head_of_a_student(
    settings: dict[str, Any], activation: str | None, saved: Callable[..., Any], teacher: Path
) -> None:
    _, run = saved("simclr")
    folders = {"its teacher": teacher, "itself": run}
    if (path := settings["teacher"].get("path")) in folders:
        settings = {**settings, "teacher": {"layout": "run", "path": str(folders[path])}}
    change(run, lambda a: a.update(method="seed", method_kwargs=settings))
    found = load(run)
    assert activation is None if found.head is None else f"{activation}(" in str(found.head).lower()


def test_normalisation_and_size_of_the_run(saved: Callable[..., Any]) -> None:
    crops = {"crop_size": 24, "num_crops": 2, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    _, run = saved("simclr", augmentations=[crops])
    found = load(run)
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert found.input_size == 24
    change(run, lambda a: a["data"].update(dataset="cifar10"))
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
        "data_dir": "images",
        "train_dir": "train",
        "val_dir": None,
        "batch_size": 24,
        "transform_kwargs": {"crop_size": 16, "mean": [0.5] * 3, "std": [0.2] * 3},
    }
    (run / "args.json").write_text(json.dumps(args))
    x = torch.randn(2, 3, 16, 16)
    for networks, before in expected.items():
        found = load(run, networks=networks)
        assert torch.equal(found.backbone(x), before.backbone(x))
        assert str(found.head) == str(before.head)
        assert found.head is not None
        assert (found.mean, found.std) == ((0.5,) * 3, (0.2,) * 3)
    data = load_pretrained(run).cfg.data
    assert (data.train_path, data.val_path) == ("images/train", None)
    args |= {"dataset": "cifar10", "transform_kwargs": [{"crop_size": 16}], "data_dir": "c"}
    (run / "args.json").write_text(json.dumps(args))
    data = load_pretrained(run).cfg.data
    assert (data.train_path, data.val_path) == ("c", "c")
    args["data_dir"] = "<not serializable>"
    (run / "args.json").write_text(json.dumps(args))
    assert load_pretrained(run).cfg.data.train_path is None


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
    assert own - without_projector - students <= {*GELU, *RELU}
