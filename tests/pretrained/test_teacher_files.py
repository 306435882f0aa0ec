"""Files that are no teacher, and sources that name none."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.core.errors import UserError
from solo_ext.pretrained.teachers import LoadedTeacher, TeacherSource, load_teacher

NAMES = ("moco_v2", "swav", "dino_resnet50", "dino_deitsmall16")


MakeOfficial = Callable[..., Any]


def load(path: Path, content: Any, official: Any) -> LoadedTeacher:
    torch.save(content, path)
    return load_teacher(TeacherSource(path=str(path), **official.source))


def refusal(path: Path, content: Any, official: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(path, content, official)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("layout", ["moco_v2", "swav", "dino"])
def test_code_in_a_checkpoint_is_not_run(
    layout: str, official: MakeOfficial, harmful: Any, tmp_path: Path
) -> None:
    given = official("dino_resnet50" if layout == "dino" else layout, tiny=True)
    for content in (
        {**given.content, "epoch": harmful},
        {**given.content, "args": argparse.Namespace(arch=harmful)},
    ):
        assert "cannot be read" in refusal(tmp_path / "file.pth", content, given)
        assert not harmful.target.exists()


def test_arguments_of_a_training_are_read_in_dino_files_alone(
    official: MakeOfficial, tmp_path: Path
) -> None:
    given = official("moco_v2", tiny=True)
    content = {**given.content, "args": argparse.Namespace(arch="resnet50")}
    assert "argparse.Namespace" in refusal(tmp_path / "file.pth", content, given)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("moco_v2", {"state_dict": None}, "holds no weights in 'state_dict'"),
        ("moco_v2", {"state_dict": {}}, "holds no weights in 'state_dict'"),
        ("moco_v2", {"state_dict": {"a": 3}}, "unexpected: a"),
        ("swav", [1], "holds a list"),
        ("dino_resnet50", {"epoch": 3}, "unexpected: epoch"),
        ("dino_resnet50", {"teacher": {3: torch.ones(1)}}, "unexpected: 3"),
    ],
)
def test_files_that_are_no_checkpoint(
    name: str, content: Any, says: str, official: MakeOfficial, tmp_path: Path
) -> None:
    assert says in refusal(tmp_path / "file.pth", content, official(name, tiny=True))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("head.last_layer.weight", 0.0, "rows that are zero or not finite"),
        ("head.last_layer.weight", float("inf"), "rows that are zero or not finite"),
        ("backbone.conv1.0.weight", float("nan"), "not finite; is the file damaged?"),
        ("head.mlp.0.bias", float("nan"), "not finite; is the file damaged?"),
    ],
)
def test_damaged_values(
    key: str, value: float, says: str, official: MakeOfficial, tmp_path: Path
) -> None:
    given = official("dino_resnet50", tiny=True)

    def spoil(weights: dict[str, Tensor]) -> None:
        weights[key] = weights[key].clone()
        weights[key][0] = value

    assert says in refusal(tmp_path / "file.pth", given.edited(spoil), given)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"layout": "moco_v2"}, "path=null: layout moco_v2 needs a file; download https://dl.fb"),
        ({"layout": "swav", "path": "no"}, "swav_800ep_pretrain.pth.tar and name it by method_kw"),
        ({"layout": "dino", "path": "no"}, "dino_deitsmall16_pretrain_full_checkpoint.pth and"),
        ({"layout": "dino", "path": "."}, "path='.': this is a folder"),
        ({"layout": "run"}, "layout run needs a run directory or checkpoint"),
        ({"layout": "run", "path": "."}, "is no run directory"),
        ({"layout": "run", "path": ".", "model": "resnet18"}, "a run says itself what it is"),
        ({"layout": "swav", "path": __file__, "networks": "momentum"}, "has no choice"),
        ({"layout": "timm"}, "model=null: layout timm needs a model; for example resnet50.a1_in1k"),
        ({"layout": "torchvision"}, "for example resnet50:IMAGENET1K_V2"),
    ],
)
def test_sources_that_do_not_do(
    source: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_teacher(TeacherSource(**source))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("model", "kwargs", "says"),
    [
        ("resnet81", {}, "did you mean 'resnet18'?"),
        ("timm/resnet81", {}, "unknown architecture"),
        ("resnet50", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("squeezenet1_0", {}, "ends in no linear layer"),
    ],
)
def test_architectures_that_there_are_not(
    model: str, kwargs: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.pth"
    torch.save({"conv1.weight": torch.ones(1)}, path)
    source = TeacherSource(layout="swav", path=str(path), model=model, model_kwargs=kwargs)
    with pytest.raises(UserError) as caught:
        load_teacher(source)
    assert says in str(caught.value)


@pytest.mark.parametrize("size", [0, 10, 5000])
@pytest.mark.parametrize("name", NAMES)
def test_truncated(name: str, size: int, official: MakeOfficial, tmp_path: Path) -> None:
    given, path = official(name, tiny=True), tmp_path / "file.pth"
    torch.save(given.content, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"file\.pth' cannot be read"):
        load_teacher(TeacherSource(path=str(path), **given.source))
