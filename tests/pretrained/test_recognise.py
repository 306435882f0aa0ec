"""Teachers by one word: what is recognised, that it loads as if written by hand, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from solo_ext.config.check import check_method_kwargs
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.methods.protoseed import ProtoSEEDKwargs
from solo_ext.pretrained.export import export
from solo_ext.pretrained.libraries import fitted
from solo_ext.pretrained.recognise import recognise_teacher, student_settings
from solo_ext.pretrained.teachers import load_teacher
from tests.pretrained.conftest import (
    OFFICIAL,
    TINY_RESNET,
    MakeRun,
    Official,
    features,
    refusal,
    shaken,
)

MakeOfficial = Callable[..., Official]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PUBLISHED = {
    "moco_v2": ("moco_v2", "resnet50"),
    "swav": ("swav", "resnet50"),
    "dino_resnet50": ("dino", "resnet50"),
    "dino_deitsmall16": ("dino", "timm/vit_small_patch16_224"),
}


def dinov2(network: nn.Module) -> dict[str, Tensor]:
    """The weights of a timm model with the keys that DINOv2's authors published."""
    state = dict(network.state_dict())
    if "reg_token" in state:
        # timm adds the class token's position to the token, and keeps those of the patches.
        first = torch.randn(1, 1, state["cls_token"].shape[-1])
        state["register_tokens"] = state.pop("reg_token")
        state["cls_token"] = state["cls_token"] - first
        state["pos_embed"] = torch.cat([first, state["pos_embed"]], dim=1)
    return {**state, "mask_token": torch.randn(1, state["cls_token"].shape[-1])}


def timm_model(name: str, **kwargs: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = timm.create_model(name, **kwargs)
    for key, value in network.state_dict().items():
        if key.endswith("gamma"):
            # Of 1e-5 at first, with which the blocks would hardly matter.
            value.fill_(0.5)
    return shaken(network)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "moco_v2" else [pytest.mark.slow]) for n in OFFICIAL],
)
def test_published_files(name: str, published: Callable[[str], Path]) -> None:
    """And what a student of them needs; what is loaded then, the tests of layouts compare."""
    path = published(name)
    source = recognise_teacher(str(path))
    layout, model = PUBLISHED[name]
    assert source == TeacherKwargs(layout=layout, path=str(path), model=model)  # type: ignore[arg-type]
    settings = student_settings(source, 100)
    # A ResNet takes any crop, a transformer whole patches of 16 pixels.
    size, more = (96, {"dynamic_img_size": True}) if "deit" in name else (100, {})
    assert settings.crop_size == size
    assert settings.method_kwargs["head"] == "teacher"
    kwargs = check_method_kwargs(ProtoSEEDKwargs, settings.method_kwargs)
    assert kwargs.teacher == source.model_copy(update={"model_kwargs": more})
    assert str(path) in settings.description


def test_key_encoder_and_queue_make_no_difference(official: MakeOfficial, tmp_path: Path) -> None:
    given, path = official("moco_v2"), tmp_path / "file.pth"
    weights = dict(given.weights)
    weights |= {k.replace("encoder_q", "encoder_k"): v for k, v in given.weights.items()}
    torch.save({"state_dict": {**weights, "module.queue": torch.zeros(128, 4)}}, path)
    assert recognise_teacher(str(path)).layout == "moco_v2"


def test_torchvision_files(tmp_path: Path) -> None:
    network = shaken(torchvision.models.get_model("resnet34"))
    torch.save({"model": network.state_dict(), "epoch": 3}, tmp_path / "m.pth")
    source = recognise_teacher(str(tmp_path / "m.pth"))
    assert (source.layout, source.model, source.model_kwargs) == ("torchvision", "resnet34", {})
    teacher = load_teacher(source)
    network.add_module("fc", nn.Identity())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(features(teacher.backbone, x), features(network, x))
    assert (teacher.mean, teacher.std) == IMAGENET


def test_torchvision_files_of_wider_networks(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = torchvision.models.get_model("wide_resnet50_2").state_dict()
    # One number for each tensor of the file.
    weights = {k: torch.zeros((), dtype=v.dtype).expand(v.shape) for k, v in shapes.items()}
    torch.save(weights, tmp_path / "m.pth")
    source = recognise_teacher(str(tmp_path / "m.pth"))
    assert (source.layout, source.model) == ("torchvision", "wide_resnet50_2")
    assert source.model_kwargs == {}


@pytest.mark.slow
def test_a_transformer_of_one_size(tmp_path: Path) -> None:
    network: Any = torchvision.models.vit_b_32(image_size=64)
    torch.save(network.state_dict(), tmp_path / "m.pth")
    source = recognise_teacher(str(tmp_path / "m.pth"))
    assert (source.model, source.model_kwargs) == ("vit_b_32", {"image_size": 64})
    assert student_settings(source, 100).crop_size == 64
    teacher = load_teacher(source)
    assert teacher.input_size == 64
    network.heads.add_module("head", nn.Identity())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(features(teacher.backbone, x), features(network.eval(), x))


@pytest.mark.parametrize("model", ["vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"])
def test_dinov2(model: str, tmp_path: Path) -> None:
    network = timm_model(model, num_classes=0, img_size=56)
    torch.save(dinov2(network), tmp_path / "file.pth")
    source = recognise_teacher(str(tmp_path / "file.pth"))
    assert (source.layout, source.model) == ("timm", model)
    assert source.model_kwargs == {"img_size": 56}
    teacher = load_teacher(source)
    x = torch.randn(2, 3, 56, 56)
    torch.testing.assert_close(
        features(teacher.backbone, x), features(network, x), rtol=1e-4, atol=1e-4
    )
    assert (teacher.mean, teacher.std) == IMAGENET


def test_dinos_backbone_alone(tmp_path: Path) -> None:
    """``dino_deitsmall8_pretrain.pth``, which most people fetch, has no head."""
    network = timm_model("vit_small_patch8_224", num_classes=0)
    path = tmp_path / "file.pth"
    torch.save(network.state_dict(), path)
    source = recognise_teacher(str(path))
    assert (source.layout, source.model) == ("dino", "timm/vit_small_patch8_224")
    teacher = load_teacher(source)
    assert str(teacher.backbone) == str(network)
    torch.testing.assert_close(teacher.backbone.state_dict(), network.state_dict())
    assert (teacher.mean, teacher.std) == IMAGENET


def test_what_fits_two_models_is_refused(tmp_path: Path) -> None:
    """DeiT was trained with ImageNet's mean and deviation, timm's own ViT with 0.5."""
    path = str(tmp_path / "m.pth")
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), path)
    line = refusal(recognise_teacher, path, "--teacher")
    assert line.startswith(f"--teacher={path!r}: its keys and shapes fit ")
    assert "deit_tiny_patch16_224 (mean (0.485, 0.456, 0.406))" in line
    assert "vit_tiny_patch16_224 (mean (0.5, 0.5, 0.5))" in line
    assert f'"method_kwargs.teacher={{layout: timm, path: {path}, model: NAME}}"' in line
    # What the message says to write is taken.
    for model, mean in (
        ("deit_tiny_patch16_224", IMAGENET[0]),
        ("vit_tiny_patch16_224", (0.5,) * 3),
    ):
        teacher = load_teacher(TeacherKwargs(layout="timm", path=path, model=model))
        assert teacher.mean == mean


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"state_dict": {"module.base_encoder.a": torch.ones(1)}}, "no layout that is known"),
        ({"state_dict": {"a": torch.ones(2)}}, "1 entries: a (2,)"),
        ({"teacher": {"backbone.a": torch.ones(1), "dino_head.b": torch.ones(1)}}, "dino_head.b"),
        (
            # As many as a ResNet-18 has: all networks of that number are tried.
            {f"layer1.{n}.conv1.weight": torch.ones(3, 3, 3, 3) for n in range(8)},
            "architecture is not recognised",
        ),
        ({"features.0.weight": torch.ones(3)}, "architecture is not recognised (1 entries: feat"),
        ({}, "no layout that is known (it is empty"),
    ],
)
def test_files_of_no_known_layout(content: Any, says: str, tmp_path: Path) -> None:
    path = str(tmp_path / "file.pth")
    torch.save(content, path)
    line = refusal(recognise_teacher, path)
    assert says in line
    assert path in line


@pytest.mark.parametrize("content", [b"{}", b"some text", b"", b"PK\x03\x04 cut short"])
def test_files_that_are_no_checkpoint(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    line = refusal(recognise_teacher, str(path))
    assert line.endswith("it is no file of torch.save, or a damaged one")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("", "no such file or folder; give a run directory"),
        ("resnet50", "no such file or folder; give a run directory"),
        ("timm/resnet51", "timm has no such model; did you mean 'resnet"),
        ("timm/resnet50.a9", "timm has no weights 'a9'"),
        ("torchvision/resnet50.a1", "unknown architecture; did you mean 'resnet50'"),
        ("torchvision/resnet50:V3", "torchvision has no weights 'V3'; allowed: IMAGENET1K_V1"),
    ],
)
def test_words_that_name_nothing(word: str, says: str) -> None:
    line = refusal(recognise_teacher, word)
    assert line.startswith(f"method_kwargs.teacher={word!r}: {says}")


def test_models_of_libraries() -> None:
    source = recognise_teacher("timm/vit_small_patch14_dinov2.lvd142m")
    assert source == TeacherKwargs(layout="timm", model="vit_small_patch14_dinov2.lvd142m")
    source = recognise_teacher("torchvision/resnet50:IMAGENET1K_V2")
    assert source == TeacherKwargs(layout="torchvision", model="resnet50:IMAGENET1K_V2")


def test_runs_checkpoints_and_exports(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    (checkpoint,) = run.glob("*.ckpt")
    assert recognise_teacher(str(run)) == TeacherKwargs(path=str(run))
    assert recognise_teacher(str(checkpoint)) == TeacherKwargs(path=str(checkpoint))
    trained = load_teacher(recognise_teacher(str(run)))
    folder = export(run, "timm", tmp_path / "folder").out
    file = export(run, "safetensors", tmp_path / "file.safetensors").out
    x = torch.randn(2, 3, 32, 32)
    for path in (folder, file):
        source = recognise_teacher(str(path))
        assert source == TeacherKwargs(layout="export", path=str(path))
        teacher = load_teacher(source)
        torch.testing.assert_close(
            features(teacher.backbone, x), features(trained.backbone, x), rtol=1e-5, atol=1e-5
        )
        assert (teacher.mean, teacher.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
        assert (teacher.input_size, teacher.head) == (32, None)
    shutil.move(checkpoint, tmp_path / "alone.ckpt")
    assert "a folder without a checkpoint" in refusal(recognise_teacher, str(run))
    line = refusal(recognise_teacher, str(tmp_path / "alone.ckpt"))
    assert "architecture is not recognised" in line


def test_a_checkpoint_of_lightning_needs_its_args(make_run: MakeRun, tmp_path: Path) -> None:
    (checkpoint,) = make_run().glob("*.ckpt")
    content = torch.load(checkpoint)
    torch.save({**content, "pytorch-lightning_version": "2.6.6"}, tmp_path / "alone.ckpt")
    source = recognise_teacher(str(tmp_path / "alone.ckpt"))
    assert "no args.json beside" in refusal(load_teacher, source)


def test_folders_of_timm(tmp_path: Path) -> None:
    """As the Hub has them: ``config.json`` says the architecture and the normalisation."""
    network = timm_model("resnet10t", num_classes=5, **TINY_RESNET)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    cfg = {"tag": "c3_in1k", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    about = {
        "architecture": "resnet10t",
        "model_args": {**TINY_RESNET, "checkpoint_path": "/elsewhere"},
        "pretrained_cfg": cfg,
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    teacher = load_teacher(recognise_teacher(str(tmp_path)))
    assert (teacher.mean, teacher.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    network.reset_classifier(0)  # type: ignore[operator]
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(features(teacher.backbone, x), features(network, x))
    for spoilt in ("[]", "{", json.dumps({**about, "architecture": "mine"}), "{}"):
        (tmp_path / "config.json").write_text(spoilt)
        assert "is not of a model of timm" in refusal(recognise_teacher, str(tmp_path))


def test_student_of_dinov2(tmp_path: Path) -> None:
    network = timm_model("vit_small_patch14_dinov2", num_classes=0, img_size=56)
    torch.save(dinov2(network), tmp_path / "file.pth")
    source = recognise_teacher(str(tmp_path / "file.pth"))
    settings = student_settings(source, 96)
    assert (settings.crop_size, settings.method_kwargs["head"]) == (98, "mlp")
    teacher = load_teacher(TeacherKwargs(**settings.method_kwargs["teacher"]))
    # As timm resizes the positions itself.
    wanted = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=98)
    wanted.load_state_dict(fitted(wanted, network.state_dict()))
    x = torch.randn(2, 3, 98, 98)
    torch.testing.assert_close(
        features(teacher.backbone, x), features(wanted, x), rtol=1e-4, atol=1e-4
    )
