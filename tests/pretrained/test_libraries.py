"""Models of timm and torchvision as teachers, out of files and out of their own stores."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from solo_ext.core.errors import UserError
from solo_ext.methods.distillation import TeacherKwargs
from solo_ext.pretrained.libraries import _load_file, fitted
from solo_ext.pretrained.loaded import LoadedTeacher
from solo_ext.pretrained.teachers import load_teacher
from tests.pretrained.conftest import refusal

TINY = {"channels": [8, 8, 8, 8]}
TIMM, TORCHVISION = "resnet10t", "shufflenet_v2_x0_5"


def timm_model(classes: int) -> Any:
    torch.manual_seed(0)
    return timm.create_model(TIMM, num_classes=classes, **TINY).eval()


def load(**source: Any) -> LoadedTeacher:
    if source["layout"] == "timm":
        source = {"model": TIMM, "model_kwargs": TINY, **source}
    return load_teacher(TeacherKwargs(**{"model": TORCHVISION, **source}))


def same_features(teacher: LoadedTeacher, network: nn.Module) -> bool:
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        return torch.equal(teacher.backbone(x), network(x))


@pytest.mark.parametrize("classes", [0, 7])
def test_timm_file(classes: int, tmp_path: Path) -> None:
    network = timm_model(classes)
    state = network.state_dict()
    network.reset_classifier(0)
    safe, plain, trained = (tmp_path / n for n in ("m.safetensors", "m.pth", "c.pth.tar"))
    save_file(state, safe)
    torch.save(state, plain)
    averaged = {f"module.{k}": v for k, v in state.items()}
    worse = {k: torch.zeros_like(v) for k, v in averaged.items()}
    torch.save({"epoch": 3, "state_dict": worse, "state_dict_ema": averaged}, trained)
    for path in (safe, plain, trained):
        teacher = load(layout="timm", path=str(path))
        assert same_features(teacher, network)
        assert (teacher.features_dim, teacher.head, teacher.prototypes) == (8, None, None)
        assert teacher.digest == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert "averaged weights" in teacher.description
    config = timm.get_pretrained_cfg(TIMM)
    assert (teacher.mean, teacher.std) == (config.mean, config.std)
    assert teacher.input_size == config.input_size[-1] == 176


def test_timm_file_of_another_size(tmp_path: Path) -> None:
    """Positions of a ViT are resized as in a download of the same weights."""
    small = {"embed_dim": 8, "depth": 1, "num_heads": 1}
    path = str(tmp_path / "m.safetensors")
    save_file(timm.create_model("vit_tiny_patch16_224", **small).state_dict(), path)
    kwargs = {**small, "img_size": 64}
    model = {"model": "vit_tiny_patch16_224", "layout": "timm"}
    downloaded = load(**model, model_kwargs={**kwargs, "pretrained_cfg_overlay": {"file": path}})
    teacher = load(**model, model_kwargs=kwargs, path=path)
    assert same_features(teacher, downloaded.backbone)
    assert teacher.input_size == 64
    line = refusal(load, **model, model_kwargs={**kwargs, "embed_dim": 16}, path=path)
    assert "of another shape: " in line


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda s: s.pop("layer1.0.bn1.weight"), "missing: layer1.0.bn1.weight"),
        (lambda s: s.update({"fc2.weight": torch.ones(1)}), "unexpected: fc2.weight"),
    ],
)
def test_timm_file_of_another_model(
    edit: Callable[[dict[str, Tensor]], Any], says: str, tmp_path: Path
) -> None:
    state = timm_model(7).state_dict()
    edit(state)
    path = tmp_path / "m.safetensors"
    save_file(state, path)
    line = refusal(load, layout="timm", path=str(path))
    assert says in line
    assert "another method_kwargs.teacher.model" in line
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read" in refusal(load, layout="timm", path=str(path))


def test_timm_own_weights(tmp_path: Path) -> None:
    """As timm fetches them, from a file in the place of its store."""
    network = timm_model(1000)
    stored = tmp_path / "m.pth"
    torch.save(network.state_dict(), stored)
    network.reset_classifier(0)
    overlay = {**TINY, "pretrained_cfg_overlay": {"file": str(stored)}}
    before = torch.random.get_rng_state()
    teacher = load(layout="timm", model=f"{TIMM}.c3_in1k", model_kwargs=overlay)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same_features(teacher, network)
    assert "resnet10t.c3_in1k of timm" in teacher.description
    again = load(layout="timm", model=TIMM, model_kwargs=overlay)
    assert again.digest == teacher.digest
    network.state_dict()["bn1.bias"].add_(1)
    torch.save({**torch.load(stored), "bn1.bias": network.state_dict()["bn1.bias"]}, stored)
    assert load(layout="timm", model_kwargs=overlay).digest != teacher.digest
    torch.save({**torch.load(stored), "bn1.more": torch.ones(1)}, stored)
    line = refusal(load, layout="timm", model_kwargs=overlay)
    assert "timm cannot get the weights of 'resnet10t'" in line
    assert "name the file by method_kwargs.teacher.path" in line


def test_torchvision_file(tmp_path: Path) -> None:
    network = torchvision.models.get_model(TORCHVISION, num_classes=7).eval()
    state, path = network.state_dict(), tmp_path / "m.pth"
    network.fc = nn.Identity()
    averaged = AveragedModel(network).state_dict()
    worse = {k: torch.zeros_like(v) for k, v in state.items()}
    trained = [{"model": state, "epoch": 3, "optimizer": {}}]
    trained += [{"model": worse, "model_ema": averaged, "epoch": 3}]
    for content in (state, network.state_dict(), *trained):
        torch.save(content, path)
        teacher = load(layout="torchvision", path=str(path))
        assert same_features(teacher, network)
        assert (teacher.features_dim, teacher.input_size) == (1024, 224)
    torch.save({k: v for k, v in state.items() if k != "conv5.0.weight"}, path)
    assert "missing: conv5.0.weight" in refusal(load, layout="torchvision", path=str(path))
    torch.save({**state, "fc.more": torch.ones(1)}, path)
    assert "unexpected: fc.more" in refusal(load, layout="torchvision", path=str(path))


def test_torchvision_file_of_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built as torchvision builds the download of the tag."""
    path = str(tmp_path / "m.pth")
    network = torchvision.models.googlenet(init_weights=False, transform_input=True).eval()
    torch.save(network.state_dict(), path)
    network.fc = nn.Identity()
    googlenet = {"layout": "torchvision", "path": path, "model_kwargs": {"init_weights": False}}
    assert same_features(load(**googlenet, model="googlenet:IMAGENET1K_V1"), network)
    assert not same_features(load(**googlenet, model="googlenet"), network)

    def refuse(name: str, weights: None, **kwargs: Any) -> None:
        raise ValueError(f"built with {kwargs}")

    monkeypatch.setattr(torchvision.models, "get_model", refuse)
    vit = {"layout": "torchvision", "path": path, "model": "vit_b_16:IMAGENET1K_SWAG_E2E_V1"}
    assert "built with {'image_size': 384}" in refusal(load, **vit)
    assert "{'image_size': 96}" in refusal(load, **vit, model_kwargs={"image_size": 96})


def test_torchvision_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchvision fetches them, from files already in its store."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    network = torchvision.models.get_model(TORCHVISION).eval()
    weights = torchvision.models.get_model_weights(TORCHVISION).IMAGENET1K_V1
    stored = tmp_path / "hub" / "checkpoints" / Path(weights.url).name
    stored.parent.mkdir(parents=True)
    torch.save(network.state_dict(), stored)
    network.fc = nn.Identity()
    teacher = load(layout="torchvision", model=f"{TORCHVISION}:IMAGENET1K_V1")
    assert same_features(teacher, network)
    assert "IMAGENET1K_V1" in teacher.description
    assert load(layout="torchvision").digest == teacher.digest
    torch.save({"a": torch.ones(1)}, stored)
    line = refusal(load, layout="torchvision")
    assert "torchvision cannot get" in line
    assert weights.url in line


def test_normalisation_of_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EfficientNetV2-L has 0.5; a file without tag may be of anybody's training."""
    network = torchvision.models.get_model(TORCHVISION)
    file = tmp_path / "m.pth"
    torch.save(network.state_dict(), file)
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_, **__: copy.deepcopy(network))
    for tag, mean in (("", (0.485, 0.456, 0.406)), (":IMAGENET1K_V1", (0.5, 0.5, 0.5))):
        teacher = load(layout="torchvision", model=f"efficientnet_v2_l{tag}", path=str(file))
        assert (teacher.mean, teacher.input_size) == (mean, 480)


def test_files_older_than_their_layers(tmp_path: Path) -> None:
    """As published: without counts of batches, and DenseNet's with earlier names of layers."""
    network = torchvision.models.DenseNet(growth_rate=4, block_config=(1, 1), num_init_features=8)
    old = {
        re.sub(r"(norm|conv)(\d)\.", r"\1.\2.", k) if "denselayer" in k else k: v
        for k, v in network.state_dict().items()
        if not k.endswith("num_batches_tracked")
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    file = tmp_path / "densenet.pth"
    torch.save(old, file)
    network.classifier = nn.Identity()
    _load_file(network, str(file), "torchvision", ("classifier",), "densenet121")
    with pytest.raises(UserError, match="missing: "):
        _load_file(network, str(file), "torchvision", ("classifier",), "resnet18")


def test_when_timm_makes_weights_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only weights that do not fit, with counts of batches; what it spoils stays as it was."""
    network = timm_model(0)
    plain = network.state_dict()
    old = {f"old.{k}": v for k, v in plain.items() if not k.endswith("num_batches_tracked")}

    def rename(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        return {k.removeprefix("old."): v + 1 for k, v in state.items()}

    def fail(state: dict[str, Tensor], model: nn.Module) -> None:
        state.clear()
        raise RuntimeError

    monkeypatch.setattr("timm.models.resnet.checkpoint_filter_fn", rename, raising=False)
    assert torch.equal(fitted(network, plain)["bn1.bias"], plain["bn1.bias"])
    found = fitted(network, old)
    assert found.keys() == plain.keys()
    assert torch.equal(found["bn1.bias"], plain["bn1.bias"] + 1)
    monkeypatch.setattr("timm.models.resnet.checkpoint_filter_fn", fail)
    assert fitted(network, old).keys() >= old.keys()
