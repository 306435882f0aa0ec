"""Tests of timm's models, and the host's own, as backbones."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.host import Host
from solo_ext.host.backbones import (
    SMALL_SIDE,
    BackboneTable,
    build_backbone,
    is_timm,
    small_image_kwargs,
)
from solo_ext.lab.training.prepare import prepare


def forward(backbone: nn.Module, side: int) -> Tensor:
    with torch.no_grad():
        features: Tensor = backbone.eval()(torch.randn(2, 3, side, side))
    return features


def build(
    name: str, kwargs: dict[str, Any], table: Any = None, dataset: str = "custom"
) -> tuple[nn.Module, int]:
    """By timm's models, or by a host's table."""
    table = BackboneTable() if table is None else table
    return build_backbone(table, name, kwargs, method="simclr", dataset=dataset)


def test_a_method_is_built_on_a_timm_model(loaded: Host, make_config: Any) -> None:
    """Through the host's own constructor, which on main asserts membership in its table."""
    kwargs = {"channels": [8, 8, 8, 12], "small_stem": True}
    prepared = prepare(make_config("simclr", backbone={"kwargs": kwargs}))
    method = prepared.method(prepared.cfg)
    assert method.features_dim == 12
    assert isinstance(method.backbone, timm.models.resnet.ResNet)
    assert isinstance(method.backbone.maxpool, nn.Identity)
    assert method.backbone_name == "timm/resnet10t"


@pytest.mark.parametrize(
    ("name", "width"),
    [
        # timm's `num_features` is the width before a hidden layer in the head.
        ("timm/mobilenetv3_small_050", 1024),
        ("timm/inception_next_atto", 960),
        ("timm/convnext_atto", 320),
        ("timm/vit_tiny_patch16_224", 192),
        ("vit_tiny", 192),
        ("swin_tiny", 768),
    ],
)
def test_features_are_of_the_stated_size(loaded: Host, name: str, width: int) -> None:
    kwargs = small_image_kwargs(name, {}, 32)
    if not is_timm(name):
        kwargs = {"img_size": 32, **({"patch_size": 8} if "vit" in name else {"window_size": 4})}
    backbone, features = build(name, kwargs, loaded.backbones)
    assert features == backbone.num_features == width
    assert forward(backbone, 32).shape == (2, width)


@pytest.mark.parametrize(
    ("name", "convolution"),
    [("timm/resnet18", "conv1"), ("timm/convnext_atto", "stem.0"), ("timm/resnet10t", "conv1.0")],
)
def test_the_small_stem_keeps_the_resolution(name: str, convolution: str) -> None:
    plain, _ = build(name, {})
    small, _ = build(name, {"small_stem": True})
    old, new = plain.get_submodule(convolution), small.get_submodule(convolution)
    assert isinstance(old, nn.Conv2d)
    assert isinstance(new, nn.Conv2d)
    assert old.stride > (1, 1)
    assert (new.stride, new.kernel_size, new.padding) == ((1, 1), (3, 3), (1, 1))
    assert (new.in_channels, new.out_channels) == (old.in_channels, old.out_channels)
    assert (new.bias is None) == (old.bias is None)
    # timm's ResNets halve twice before the blocks, its ConvNeXts fourfold in one convolution.
    before, after = (m.eval().forward_features(torch.zeros(1, 3, 32, 32)) for m in (plain, small))
    assert after.shape[-1] == 4 * before.shape[-1]


@pytest.mark.parametrize("name", ["convnext_tiny", "poolformer_s12"])
def test_timm_names_mean_timms_own_models(loaded: Host, name: str) -> None:
    """main registers models of these names over timm's, whose description says the first layer."""
    assert timm.models.model_entrypoint(name).__module__.startswith("timm.")
    assert timm.get_pretrained_cfg(name).first_conv
    assert name in timm.list_models(name, pretrained=True)[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm/resnet81", "did you mean 'timm/resnet18'? see timm.list_models()"),
        ("timm/", "see timm.list_models()"),
        ("resnet26", "did you mean 'timm/resnet26'?"),
        ("resnet_18", "did you mean 'resnet18'?"),
        ("nothing", "timm/<model>"),
    ],
)
def test_unknown_names(loaded: Host, make_config: Any, name: str, words: str) -> None:
    assert name not in loaded.backbones
    with pytest.raises(ConfigError) as caught:
        prepare(make_config("simclr", backbone={"name": name, "kwargs": {}}))
    assert caught.value.key == "backbone.name"
    assert str(caught.value).startswith(f"backbone.name={name!r}: unknown backbone; ")
    assert words in str(caught.value)
    if name.startswith("timm"):
        assert len(str(caught.value)) < 200, "timm's thousand models are not listed"
    with pytest.raises(ConfigError, match="unknown backbone"):
        _ = loaded.backbones[name]


def test_the_table_without_a_name(loaded: Host) -> None:
    assert loaded.backbones.get("timm/nothing") is None
    assert loaded.backbones.get("timm/nothing", 3) == 3
    assert 3 not in loaded.backbones
    for name in ("timm/resnet18.a1_in1k", "resnet18"):
        assert name in loaded.backbones
        assert loaded.backbones.get(name) is not None
    sizes = ("tiny", "small", "base", "large")
    both = {"resnet18", "resnet50", *(f"{f}_{s}" for f in ("vit", "swin") for s in sizes)}
    assert both <= set(loaded.backbones)


@pytest.mark.parametrize(
    ("dataset", "stem", "pooled"),
    [("cifar100", ((3, 3), (1, 1), (2, 2)), False), ("custom", ((7, 7), (2, 2), (3, 3)), True)],
)
def test_the_hosts_resnet_has_the_stem_of_its_data_set(
    loaded: Host, make_config: Any, dataset: str, stem: tuple[tuple[int, int], ...], pooled: bool
) -> None:
    """The seam's function and the method of the host itself build the same network."""
    built, features = build("resnet18", {}, loaded.backbones, dataset)
    prepared = prepare(make_config("simclr", backbone={"name": "resnet18", "kwargs": {}}))
    cfg = copy.deepcopy(prepared.cfg)
    cfg.backbone.kwargs = {}
    cfg.data.dataset = dataset
    method = prepared.method(cfg)
    assert features == method.features_dim == 512
    for backbone in (built, method.backbone):
        conv = backbone.conv1
        assert (conv.kernel_size, conv.stride, conv.padding) == stem
        assert isinstance(backbone.maxpool, nn.MaxPool2d if pooled else nn.Identity)
        assert isinstance(backbone.fc, nn.Identity)
        assert forward(backbone, 32).shape == (2, 512)
    ours, theirs = built.state_dict(), method.backbone.state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (28, 3), (SMALL_SIDE, 8), (65, 0)])
def test_only_small_images_change_a_model(side: int, patch: int) -> None:
    assert small_image_kwargs("timm/resnet18", {}, side) == ({"small_stem": True} if patch else {})
    expected = {"img_size": side, "patch_size": patch} if patch else {}
    assert small_image_kwargs("timm/vit_tiny_patch16_224", {}, side) == expected
    assert small_image_kwargs("resnet18", {"a": 1}, side) == {"a": 1}
    # Arguments that a model refuses are not added.
    assert small_image_kwargs("timm/tiny_vit_5m_224", {}, side) == {}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("timm/resnet18", {"small_stem": False}),
        ("timm/vit_tiny_patch16_224", {"img_size": 48, "patch_size": 16}),
    ],
)
def test_what_is_given_stays(loaded: Host, make_config: Any, name: str, given: Any) -> None:
    held = dict(given)
    side = given.get("img_size", 32)
    found = small_image_kwargs(name, given, side)
    assert {key: found[key] for key in given} == held
    assert given == held, "the caller's own mapping is left alone"
    config = make_config("simclr", augmentations=[{"crop_size": side, "num_crops": 2}])
    config["backbone"] = {"name": name, "kwargs": given}
    kwargs = prepare(config).cfg.backbone.kwargs
    assert {key: kwargs[key] for key in given} == held


def test_lists_of_yaml_become_tuples_and_given_classes_are_kept() -> None:
    model, _ = build("timm/vit_tiny_patch16_224", {"img_size": [32, 16], "patch_size": 8})
    assert model.patch_embed.grid_size == (4, 2)
    assert model.num_classes == 0


@pytest.mark.parametrize("name", ["timm/resnet10t", "timm/vit_tiny_patch16_224", "resnet18"])
def test_an_argument_that_the_model_does_not_take_is_refused(loaded: Host, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, {"no_such_argument": 1}, loaded.backbones)
    assert caught.value.key == "backbone.kwargs"
    assert "no_such_argument" in str(caught.value)
    assert name.removeprefix("timm/") in str(caught.value)


def test_a_packed_file_of_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights/data.pkl", bytes(2**20))
    with pytest.raises(UserError, match="is compressed"):
        build("timm/resnet18", {"checkpoint_path": str(file)})


def test_a_small_stem_is_refused_where_there_are_patches() -> None:
    with pytest.raises(ConfigError, match="img_size and patch_size") as caught:
        build("timm/vit_tiny_patch16_224", {"small_stem": True})
    assert caught.value.key == "backbone.kwargs.small_stem"
