"""Backbones out of run directories and checkpoint folders."""

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

from solo_ext.core.errors import UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.pretrained.runs import load_pretrained

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


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_pretrained(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_weights_are_those_of_the_checkpoint(run: Path) -> None:
    found = load_pretrained(run)
    state = torch.load(found.checkpoint, weights_only=True)["state_dict"]
    weights = {k.removeprefix("backbone."): v for k, v in state.items() if "backbone." in k}
    own = found.backbone.state_dict()
    assert own.keys() == weights.keys()
    assert all(torch.equal(own[k], weights[k]) for k in weights)
    assert found.features_dim == found.backbone(torch.zeros(2, 3, 16, 16)).shape[1]
    assert found.cfg["method"] == "simclr"
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
    names = [
        "z.ckpt",
        "a-ep=9.ckpt",
        "a-ep=10-step=90.ckpt",
        "a-ep=10-step=700.ckpt",
        "a-ep=10.ckpt",
    ]
    for name in names:
        shutil.copy(file, run / name)
    file.unlink()
    for name in reversed(names):
        assert load_pretrained(run).checkpoint.name == name
        (run / name).unlink()


def test_names_of_the_release(run: Path) -> None:
    """``encoder.*`` and flat arguments give the same backbone."""
    expected = load_pretrained(run).backbone.state_dict()
    for file in run.glob("*.ckpt"):
        held = torch.load(file, weights_only=True)
        state = {k.replace("backbone.", "encoder."): v for k, v in held["state_dict"].items()}
        torch.save({**held, "state_dict": state}, file)
    args = {
        "encoder": "timm/resnet10t",
        "backbone_args": {"cifar": False, "channels": [8, 8, 8, 8], "small_stem": False},
        "method": "simclr",
        "dataset": "custom",
        "data_dir": "images",
        "train_dir": "train",
        "val_dir": None,
        "batch_size": 24,
        "transform_kwargs": {"crop_size": 16, "mean": [0.5] * 3, "std": [0.2] * 3},
    }
    (run / "args.json").write_text(json.dumps(args))
    found = load_pretrained(run)
    own = found.backbone.state_dict()
    assert all(torch.equal(own[k], v) for k, v in expected.items())
    assert found.cfg["data"]["train_path"] == "images/train"
    assert found.cfg["data"]["val_path"] is None
    assert found.cfg["augmentations"][0]["mean"] == [0.5] * 3
    args |= {"dataset": "cifar10", "transform_kwargs": [{"crop_size": 16}], "data_dir": "c"}
    (run / "args.json").write_text(json.dumps(args))
    data = load_pretrained(run).cfg["data"]
    assert (data["train_path"], data["val_path"]) == ("c", "c")
    args["data_dir"] = "<not serializable>"
    (run / "args.json").write_text(json.dumps(args))
    assert load_pretrained(run).cfg["data"]["train_path"] is None


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda a: a.pop("backbone"), "names no backbone"),
        (lambda a: a["backbone"].pop("name"), "backbone.name=null: this key is required"),
        (lambda a: a["backbone"].update(name="timm/resnet81"), "did you mean 'timm/resnet18'?"),
        (lambda a: a["backbone"].update(kwargs=[1]), "backbone.kwargs=[1]: not a valid value"),
        (lambda a: a["backbone"]["kwargs"].update(width=8), "unexpected keyword argument 'width'"),
        (
            lambda a: a["backbone"]["kwargs"].update(channels=[16] * 4),
            "of another shape: layer1.0.conv1",
        ),
        (lambda a: a["backbone"].update(name="timm/resnet14t"), "missing: layer1.0.conv3.weight"),
        (lambda a: a.pop("data"), "data=null: this key is required"),
        (lambda a: a["data"].update(dataset=None), "data.dataset=null: not a valid value"),
        (lambda a: a.update(augmentations=[]), "augmentations=[]: not a valid value"),
        (lambda a: a["augmentations"][0].pop("crop_size"), "augmentations.0.crop_size=null"),
        (lambda a: a["optimizer"].update(batch_size=0), "optimizer.batch_size=0: not a valid"),
    ],
)
def test_args_that_do_not_do(edit: Callable[[dict[str, Any]], Any], says: str, run: Path) -> None:
    change(run, edit)
    assert says in refusal(run)


@pytest.mark.parametrize("text", ["", "[1]", '{"encoder": 3}', "{", "\x00", "[" * 5000])
def test_args_that_are_none(text: str, run: Path) -> None:
    (run / "args.json").write_text(text)
    assert str(run / "args.json") in refusal(run)


def test_folders_without_a_run(run: Path, tmp_path: Path) -> None:
    assert "no such run directory" in refusal(tmp_path / "nothing")
    (run / "args.json").unlink()
    assert "no args.json beside" in refusal(run)
    for file in run.glob("*.ckpt"):
        file.unlink()
    assert "no .ckpt file in it" in refusal(run)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_torn_checkpoint(size: int, run: Path) -> None:
    last = load_pretrained(run).checkpoint
    last.write_bytes(last.read_bytes()[:size])
    line = refusal(run)
    assert line.startswith(f"checkpoint {str(last)!r} cannot be read: ")
    assert not line.endswith(": ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1, 2], "holds a list"),
        ({"weights": torch.zeros(1)}, "no Lightning checkpoint"),
        ({"state_dict": None}, "no Lightning checkpoint"),
        ({"state_dict": {"head.weight": torch.zeros(1)}}, "holds no backbone"),
    ],
    ids=("list", "other", "none", "head"),
)
def test_files_that_are_no_checkpoint(content: Any, says: str, run: Path) -> None:
    for file in run.glob("*.ckpt"):
        torch.save(content, file)
    assert says in refusal(run)


class Harmful:
    """Unpickling it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_code_in_a_checkpoint_is_not_run(run: Path, tmp_path: Path) -> None:
    for file in run.glob("*.ckpt"):
        held = torch.load(file, weights_only=True)
        torch.save({**held, "extra": Harmful(tmp_path / "written")}, file)
    assert "cannot be read" in refusal(run)
    assert not (tmp_path / "written").exists()
